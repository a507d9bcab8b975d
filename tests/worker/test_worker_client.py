"""WorkerClient against real processes that behave badly; no torch."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from bench import is_running, until

from aglite.engine.base import SamplingParams
from aglite.engine.worker_client import WorkerClient
from aglite.errors import AgliteError, EngineError

PRELUDE = """
import os, sys, time
from aglite.worker.io import Connection
connection = Connection(sys.argv[-1])
"""


def client_of(tmp_path, script, **options):
    path = tmp_path / "child.py"
    path.write_text(PRELUDE + textwrap.dedent(script))
    return WorkerClient([sys.executable, "-u", str(path)], log_path=tmp_path / "worker.log", **options)


SERVE = """
connection.start()
connection.send({"op": "ready", "info": {"kind": "embedded"}})
while True:
    frame = connection.inbox.get()
"""


async def test_sigkill_is_noticed_with_the_last_log_lines(tmp_path):
    client = client_of(tmp_path, "print('almost out of memory')" + SERVE)
    await client.start()
    stream = client.generate([1, 2], SamplingParams(max_tokens=4))
    waiting = asyncio.ensure_future(anext(stream))
    call = asyncio.ensure_future(client.stats())
    await asyncio.sleep(0.1)
    started = time.monotonic()
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="killed by SIGKILL"):
        await waiting
    with pytest.raises(EngineError, match="almost out of memory"):
        await call
    assert time.monotonic() - started < 20, "it is not its silence, of 30 s, that is noticed"
    exit = await client.exited
    assert (exit.code, exit.stopped, exit.log) == (-9, False, ("almost out of memory",))
    with pytest.raises(EngineError, match="SIGKILL"):
        await anext(client.generate([1], SamplingParams(max_tokens=1)))


def test_ending_what_could_not_be_started_ends_nothing_else(tmp_path):
    """Process 0 means one's own group: here that of a script of its own."""
    script = """
import asyncio, pathlib, sys
from aglite.engine.child import Child
async def main():
    child = Child("nobody", pathlib.Path(sys.argv[1]))
    try:
        await child.start(["/no/such/program"])
    except FileNotFoundError:
        child.terminate()
        await child.kill("not started")
        print("alive")
asyncio.run(main())
"""
    command = [sys.executable, "-c", script, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


@pytest.mark.parametrize("first", ["", 'connection.send({"op": "ready", "info": {}})'])
async def test_a_child_that_speaks_another_protocol_is_ended_and_told_so(tmp_path, first):
    client = client_of(tmp_path, f"{first}\nconnection._socket.sendall(b'GET / HTTP/1.1\\r\\n' * 99)\ntime.sleep(60)")
    with pytest.raises(EngineError, match=r"the model worker speaks another protocol: frame of \d+ bytes"):
        await client.start()
        await client.stats()


async def test_a_process_that_nobody_can_end_is_not_waited_for(tmp_path, monkeypatch):
    """As one that a driver holds in the kernel."""
    client = client_of(tmp_path, SERVE + "    time.sleep(600)", heartbeat_timeout_s=1)
    await client.start()
    kill = os.killpg
    monkeypatch.setattr("aglite.engine.child.KILL_S", 0.2)
    monkeypatch.setattr("aglite.engine.child.os.killpg", lambda *_: None)
    os.kill(client.pid, signal.SIGSTOP)
    try:
        exit = await asyncio.wait_for(client.exited, 60)
        assert f"no sign of life for 1 s, and process {client.pid} does not end on SIGKILL" in exit.reason
        with pytest.raises(EngineError, match="does not end on SIGKILL"):
            await client.stats()
        await asyncio.wait_for(client.stop(), 60)
    finally:
        kill(client.pid, signal.SIGKILL)
    await until(lambda: not is_running(client.pid))


async def test_a_temporary_folder_may_lie_deep(tmp_path, monkeypatch):
    deep = tmp_path.joinpath(*["a-folder-of-a-job-on-a-cluster"] * 4)
    deep.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    client = client_of(tmp_path, SERVE)
    await client.start()
    await client.stop()
    assert list(deep.iterdir()) == []


async def test_a_child_that_fails_at_start_is_named_with_its_output(tmp_path):
    client = client_of(tmp_path, "print('no such model'); sys.exit(3)")
    with pytest.raises(EngineError, match=r"exit code 3(.|\n)*no such model"):
        await client.start()


async def test_a_log_of_an_earlier_run_is_not_blamed(tmp_path):
    (tmp_path / "worker.log").write_text("old news\n")
    client = client_of(tmp_path, "sys.exit(1)")
    with pytest.raises(EngineError) as caught:
        await client.start()
    assert "old news" not in str(caught.value)
    assert (tmp_path / "worker.log").read_text().startswith("old news")


async def test_a_child_that_never_connects_is_killed(tmp_path):
    client = WorkerClient(
        [sys.executable, "-c", "import time; time.sleep(60)"], log_path=tmp_path / "log", start_timeout_s=1
    )
    with pytest.raises(EngineError, match="did not connect"):
        await client.start()
    assert not psutil.pid_exists(client.pid)


async def test_a_silent_child_is_killed(tmp_path):
    client = client_of(
        tmp_path,
        """
        connection.send({"op": "ready", "info": {}})
        time.sleep(60)
        """,
        heartbeat_timeout_s=2,
    )
    await client.start()
    exit = await asyncio.wait_for(client.exited, 60)
    assert "no sign of life" in exit.reason


async def test_heartbeats_go_on_while_the_main_thread_computes(tmp_path):
    client = client_of(
        tmp_path,
        f"""
        connection.start()
        connection.send({{"op": "ready", "info": {{}}}})
        connection.inbox.get()
        connection.send({{"op": "event", "kind": "busy", "data": {{}}}})
        while not os.path.exists({str(tmp_path / "enough")!r}):
            sum(range(10000))
        connection.send({{"op": "result", "id": 1, "value": None}})
        time.sleep(60)
        """,
    )
    seen, receive = [], client._receive

    def noted(frame):
        seen.append(frame["op"])
        receive(frame)

    client._receive = noted
    await client.start()
    call = asyncio.ensure_future(client.preempt())
    await until(lambda: "event" in seen and seen[seen.index("event") :].count("heartbeat") >= 3)
    assert not call.done() and not client.exited.done()
    (tmp_path / "enough").touch()
    await call
    await client.stop()


async def test_stop_ends_a_busy_child_and_its_children(tmp_path):
    client = client_of(
        tmp_path,
        """
        import subprocess
        print(subprocess.Popen(["sleep", "300"]).pid)
        connection.start()
        connection.send({"op": "ready", "info": {}})
        while True:
            sum(range(10000))
        """,
    )
    await client.start()
    grandchild = int((tmp_path / "worker.log").read_text())
    await client.stop(60)
    exit = await client.exited
    assert exit.stopped and exit.code == 0
    await client.stop()
    await until(lambda: not is_running(grandchild))


async def test_closing_a_generation_cancels_it_and_errors_keep_their_kind(tmp_path):
    client = client_of(
        tmp_path,
        """
        from aglite.worker.io import pack_floats, pack_ids
        connection.start()
        connection.send({"op": "ready", "info": {}})
        while True:
            frame = connection.inbox.get()
            if frame["op"] == "generate":
                items = [[frame["id"], pack_ids([7, 8]), pack_floats([-1, -2]), 3, None]]
                connection.send({"op": "tokens", "items": items})
            elif frame["op"] == "cancel":
                connection.send({"op": "event", "kind": "cancelled", "data": {"id": frame["id"]}})
            else:
                error = {"type": "AgliteError", "message": "disk full", "mend": "free some"}
                connection.send({"op": "error", "id": frame["id"], **error})
        """,
    )
    events = asyncio.Queue()
    client.on_event = lambda kind, data: events.put_nowait((kind, data))
    await client.start()
    stream = client.generate([1, 2], SamplingParams(max_tokens=4))
    chunk = await anext(stream)
    assert (chunk.token_ids, chunk.logprobs, chunk.version) == ([7, 8], [-1.0, -2.0], 3)
    await stream.aclose()
    kind, _ = await asyncio.wait_for(events.get(), 60)
    assert kind == "cancelled"
    with pytest.raises(AgliteError, match="disk full") as caught:
        await client.save("/nowhere", {})
    assert caught.value.mend == "free some" and type(caught.value) is AgliteError
    await client.stop()


async def test_silence_is_counted_and_ends(tmp_path):
    client = client_of(
        tmp_path,
        """
        connection.send({"op": "ready", "info": {}})
        connection.start()
        time.sleep(60)
        """,
    )
    await client.start()
    try:
        os.kill(client.pid, signal.SIGSTOP)
        await until(lambda: client.silent_s >= 2)
        os.kill(client.pid, signal.SIGCONT)
        await until(lambda: client.silent_s == 0)
    finally:
        await client.stop()
