"""The parts of the room that are pure, or nearly so."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests
from docker.errors import APIError
from hypothesis import given
from hypothesis import strategies as st

from aglite.config import Limits
from aglite.errors import RecipeError
from aglite.rollouts.backends import docker
from aglite.rollouts.backends import engine as engine_module
from aglite.rollouts.backends.docker import DockerRunning
from aglite.rollouts.backends.engine import Ended
from aglite.rollouts.causes import CAUSES, BackendError, Cause, kind_of
from aglite.rollouts.environment import fill
from aglite.rollouts.logfile import LogFile
from aglite.rollouts.outcome import cause_of
from aglite.rollouts.process import Exit
from aglite.rollouts.slots import Slots


@given(chunks=st.lists(st.binary(max_size=400), max_size=30), cap=st.integers(8, 2000))
def test_a_log_keeps_head_and_tail_and_counts_the_rest(tmp_path_factory, chunks, cap):
    path = tmp_path_factory.mktemp("log") / "log"
    log = LogFile(path, cap)
    for chunk in chunks:
        log.write(memoryview(chunk))
    log.close()
    said, kept = b"".join(chunks), path.read_bytes()
    if len(said) <= cap:
        assert kept == said and log.left_out == 0
        return
    note = f"\n[... {len(said) - cap:,} bytes left out ...]\n".encode()
    tail = cap // 4
    assert kept == said[: cap - tail] + note + said[len(said) - tail :]
    assert log.left_out == len(said) - cap


def test_a_log_with_a_header_has_it_only_if_there_is_output(tmp_path):
    path = tmp_path / "log"
    path.write_text("before\n")
    LogFile(path, 100, header=b"--- more ---\n", append=True).close()
    assert path.read_text() == "before\n"
    log = LogFile(path, 100, header=b"--- more ---\n", append=True)
    log.write(b"after\n")
    log.write(b"\x1b[31mred\x1b[0m \n\n")
    log.close()
    assert path.read_text() == "before\n--- more ---\nafter\n\x1b[31mred\x1b[0m \n\n"
    assert log.last_line() == " [31mred [0m"


def test_a_log_that_cannot_be_written_costs_output_only(caplog):
    log = LogFile(Path("/dev/full"), 1000)
    log.write(b"x" * 100)
    log.write(b"last")
    log.close()
    assert log.written == 104 and log.last_line().endswith("last")
    assert "ends early" in caplog.text


TASK = {"id": "t", "public": {"a": "tea", "b": {"c": 3}, "none": None}, "hidden": {"answer": "42"}}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("{task.a}!", "tea!"),
        ("{task.b.c}{task.b}", '3{"c": 3}'),
        ("{task.none}", "null"),
        ('{"json": "{task.a}"}', '{"json": "tea"}'),
        ("{other.a} {} {task}", "{other.a} {} {task}"),
    ],
)
def test_placeholders_are_filled(text, filled):
    assert fill(text, TASK, "agent.env.X") == filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{task.d}", "agent.env.X: task 't' has no 'd' in its public part\n  -> it has: a, b, none"),
        ("{task.b.d}", "no 'd' in its public.b part\n  -> it has: c"),
        ("{task.a.d}", "no 'd' in its public.a part"),
        ("{task.answer}", "no 'answer'"),
        ("{task.hidden.answer}", "no 'hidden'"),
    ],
)
def test_a_placeholder_without_a_field_is_refused_and_the_hidden_part_has_none(text, message):
    with pytest.raises(RecipeError) as error:
        fill(text, TASK, "agent.env.X")
    assert message in str(error.value)


@pytest.mark.parametrize("value", ["a\0b", "x" * 200_000, "\ud800"])
def test_a_value_that_no_process_can_be_given_is_refused(value):
    with pytest.raises(RecipeError, match="AGLITE_TASK_FILE"):
        fill("{task.a}", {"id": "t", "public": {"a": value}}, "agent.env.X")


def cause(code=1, *, rss=10.0, time=False, hit=(), infra=None, line=""):
    limits = Limits(wall_s=5, calls=3, memory_mb=100)
    found = cause_of(
        Exit(code, rss), limits=limits, out_of_time=time, limits_hit=hit, infra_error=infra, last_line=line
    )
    return str(found or "")


def test_causes():
    assert cause(0) == ""
    assert cause(0, hit={"calls"}) == ""
    assert cause(0, infra="boom") == "engine: boom"
    assert cause(1, infra="boom", time=True, hit={"calls"}) == "engine: boom"
    assert cause(0, time=True) == "wall_time: 5 s"
    assert cause(1, hit={"calls"}, line="RateLimit") == "calls: 3; then code 1: RateLimit"
    assert cause(1, hit={"sampled_tokens", "calls"}).startswith("calls: 3")
    assert cause(-9, rss=99) == "memory: limit 100 MB; SIGKILL"
    assert cause(-15) == "signal: SIGTERM"
    assert cause(2, line="usage") == "exit: code 2: usage"


def test_every_cause_has_a_kind_and_no_other_is_made():
    for code, (kind, retryable) in CAUSES.items():
        assert kind_of(str(Cause(code, "a: b"))) == kind
        assert not retryable or kind == "infrastructure"
    assert kind_of("") is None and kind_of("run stopped") is None
    with pytest.raises(ValueError):
        Cause("bad luck")


class GoneEngine:
    """A Docker Engine that has gone away."""

    def ended(self, container):
        return asyncio.get_running_loop().create_future()

    async def kill(self, container, signal):
        raise BackendError(Cause("backend", "Docker: connection refused"))

    async def remove(self, container):
        raise BackendError(Cause("backend", "Docker: connection refused"))


async def test_a_container_whose_engine_is_gone_still_lets_go_of_its_sidecar(tmp_path):
    """Which holds sockets of ours, and a volume once the engine is back."""
    let_go = []

    async def discard():
        let_go.append(True)

    sidecar, output = SimpleNamespace(discard=discard), SimpleNamespace(close=lambda: None)
    launch, agent = SimpleNamespace(limits=Limits()), SimpleNamespace(network="sealed")
    running = DockerRunning(GoneEngine(), None, sidecar, "c0ffee", output, tmp_path, launch, agent)
    with pytest.raises(BackendError, match="connection refused"):
        await running.stop()
    assert let_go == [True] and await running.stop() == []


def engine_that(**answers):
    """An engine whose client's methods are these."""
    engine = engine_module.Engine("run", "supervisor")
    engine._loop = asyncio.get_running_loop()
    engine._client = SimpleNamespace(**answers)
    return engine


@pytest.mark.parametrize(
    ("then", "told", "ended"),
    [
        ({"OOMKilled": True}, None, Ended(137, out_of_memory=True)),
        ({"OOMKilled": False}, "c", Ended(137, lost="somebody ended its container")),
        ({"OOMKilled": False}, None, Ended(137)),
    ],
)
async def test_what_an_engine_tells_a_moment_after_the_end_is_heard(monkeypatch, then, told, ended):
    """A busy one tells of a container's end before it tells that its memory was used up, or that it was killed."""
    monkeypatch.setattr(engine_module, "OTHERS_S", 0.1)
    states = iter([{"OOMKilled": False}, then])
    engine = engine_that(inspect_container=lambda _: {"State": {"ExitCode": 137, **next(states)}})
    end = engine._ends["c"] = engine._loop.create_future()
    await asyncio.to_thread(engine._tell, "c")
    if told:
        engine._others.add(told)
    assert await asyncio.wait_for(end, 60) == ended


BUSY = APIError("500", SimpleNamespace(status_code=500, reason="busy", url="x"), "device or resource busy")
GOING = APIError("409", SimpleNamespace(status_code=409, reason="going", url="x"), "removal is already in progress")
GONE = APIError("404", SimpleNamespace(status_code=404, reason="gone", url="x"), "no such container")
AWAY = requests.ConnectionError("connection refused")


@pytest.mark.parametrize(
    ("removals", "is_there", "problem"),
    [
        ([None], [], ""),
        ([GONE], [GONE], ""),
        ([GOING], [GONE], ""),  # it went by itself
        ([GOING, None], [None], ""),  # that removal failed, and left it dead
        ([BUSY, BUSY, GONE], [GONE], ""),
        ([BUSY] * 4, [], "busy"),
        ([GOING] * 4, [None] * 4, "still there"),
        ([AWAY], [], "refused"),  # when the engine is back, its run is swept
    ],
)
async def test_a_container_that_could_not_be_removed_is_removed_again(monkeypatch, removals, is_there, problem):
    monkeypatch.setattr(engine_module, "REMOVE_AGAIN_S", (0.0, 0.0, 0.0))
    left, there, asked = list(removals), list(is_there), []

    def answer(answers):
        if (error := answers.pop(0)) is not None:
            raise error

    def remove_container(container, *, force, v):
        asked.append((container, force, v))
        answer(left)

    engine = engine_that(
        remove_container=remove_container,
        wait=lambda *_, **__: None,
        inspect_container=lambda _: answer(there),
    )
    with pytest.raises(BackendError, match=problem) if problem else contextlib.nullcontext():
        await engine.remove("c")
    assert asked == [("c", True, True)] * len(removals) and left == there == []


def test_an_engine_that_stops_answering_is_said_with_the_mend(monkeypatch):
    class Hangs:
        def inspect_image(self, name):
            raise requests.ReadTimeout("read timed out")

        def close(self):
            pass

    monkeypatch.setattr(docker, "connect", lambda timeout_s: Hangs())
    with pytest.raises(RecipeError, match=r"agent.backend: Docker does not answer any more: read timed out"):
        docker.check_engine(SimpleNamespace(image="x"))


@given(
    size=st.integers(1, 4),
    steps=st.lists(st.sampled_from(["take", "give", "stop", "pause", "resume"]), max_size=40),
)
def test_slots_are_never_overcommitted_never_lost_and_go_to_the_oldest(size, steps):
    async def play():
        slots, held, paused = Slots(size), [], False
        waiting = []
        for order, step in enumerate(steps):
            if step == "take":
                stop = asyncio.get_running_loop().create_future()
                waiting.append((order, stop, asyncio.create_task(slots.take(order, stop))))
            elif step == "give" and held:
                held.pop()
                slots.give()
            elif step == "stop" and waiting:
                waiting[-1][1].set_result("stop")
            elif step in ("pause", "resume"):
                paused = step == "pause"
                getattr(slots, step)()
            for _ in range(4):
                await asyncio.sleep(0)
            took = [entry for entry in waiting if entry[2].done() and entry[2].result()]
            waiting = [entry for entry in waiting if not entry[2].done()]
            held += took
            assert len(held) <= size
            assert paused or not waiting or len(held) == size
            if took and waiting:
                assert max(entry[0] for entry in took) < min(entry[0] for entry in waiting)
        for _, stop, task in waiting:
            stop.set_result("end")
            assert await task is False

    asyncio.run(play())
