"""The writer: shared commits, order, failures that stay with whoever caused them, full disks, SIGKILL."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from making_calls import a_call, a_rollout

from aglite.errors import StoreError
from aglite.store import Store
from aglite.store.writer import Writer


async def test_many_writers_share_commits(store: Store) -> None:
    before = store.commits
    ids = await asyncio.gather(*(store.add_event("info", "run", str(number)) for number in range(500)))
    assert store.commits - before < 100
    assert len(set(ids)) == 500
    assert [event["text"] for event in store.events(limit=500)] == [str(number) for number in range(500)]


async def test_a_write_is_there_when_its_await_returns(store: Store) -> None:
    async def one(number: int) -> None:
        event = await store.add_event("info", "run", str(number))
        assert store.events(after=event - 1, limit=1)[0]["text"] == str(number)

    await asyncio.gather(*(one(number) for number in range(100)))


async def test_a_failed_write_changes_nothing_and_spares_the_others(store: Store) -> None:
    await a_rollout(store)
    results = await asyncio.gather(
        *(store.add_call(a_call("r-1" if number % 3 else "r-none")) for number in range(30)), return_exceptions=True
    )
    failed = [result for result in results if isinstance(result, BaseException)]
    assert len(failed) == 10
    assert all(isinstance(error, StoreError) and "r-none" in error.message for error in failed)
    assert len(store.calls("r-1")) == 20


async def test_an_operation_that_fails_half_way_is_undone(store: Store) -> None:
    await a_rollout(store)
    with pytest.raises(StoreError, match="constraint"):
        await store.add_rollout("r-1", "task", "g-1", "train", "local")
    assert [row["state"] for row in store.rollout_states("r-1")] == ["queued", "running"]


async def test_a_cancelled_caller_does_not_stop_the_writer(store: Store) -> None:
    task = asyncio.create_task(store.add_event("info", "run", "given up"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await store.add_event("info", "run", "next")
    assert [event["text"] for event in store.events()] == ["given up", "next"]


def test_writes_from_several_loops_and_reads_from_several_threads(store: Store) -> None:
    problems: list[BaseException] = []

    def work(name: str) -> None:
        async def main() -> None:
            for number in range(50):
                await store.add_event("info", "run", f"{name} {number}")
                store.events(limit=10)

        try:
            asyncio.run(main())
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    texts = [event["text"] for event in store.events(limit=1000)]
    for name in "abc":
        assert [text for text in texts if text.startswith(name)] == [f"{name} {number}" for number in range(50)]


async def test_close_commits_what_was_handed_in(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "aglite.db")
    waiting = [asyncio.create_task(store.add_event("info", "run", str(number))) for number in range(50)]
    await asyncio.sleep(0)
    store.close()
    await asyncio.gather(*waiting)
    with sqlite3.connect(tmp_path / "aglite.db") as other:
        assert other.execute("SELECT count(*) FROM events").fetchone()[0] == 50


async def test_writing_goes_on_after_the_file_was_full(tmp_path: Path) -> None:
    """`max_page_count` makes SQLite behave as on a full disk, down to its error code."""
    connection = sqlite3.connect(tmp_path / "full.db", isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE blobs (body BLOB)")
    connection.execute("PRAGMA max_page_count = 20")
    writer = Writer(connection, tmp_path / "full.db")

    def put(size: int):
        return lambda db: db.execute("INSERT INTO blobs VALUES (zeroblob(?))", (size,)).lastrowid

    results = await asyncio.gather(
        *(writer.write(put(size)) for size in (100, 10**6, 200, 10**6, 300)), return_exceptions=True
    )
    assert [isinstance(result, StoreError) for result in results] == [False, True, False, True, False]
    assert "disk is full" in str(results[1]) and "free some disk space" in str(results[1])
    await writer.write(lambda db: db.execute("PRAGMA max_page_count = 100000").fetchall())
    assert await writer.write(put(10**6)) == 4
    writer.close()


async def test_writes_wait_for_room_if_they_are_to(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "full.db", isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE blobs (body BLOB)")
    connection.execute("PRAGMA max_page_count = 20")
    writer = Writer(connection, tmp_path / "full.db")
    said: list[bool] = []
    writer.wait_when_full(said.append)

    def put(size: int):
        return lambda db: db.execute("INSERT INTO blobs VALUES (zeroblob(?))", (size,)).lastrowid

    await writer.write(put(100))
    waiting = [asyncio.create_task(writer.write(put(size))) for size in (10**6, 200)]
    async with asyncio.timeout(60):
        while not said:  # noqa: ASYNC110 (it has no event for it)
            await asyncio.sleep(0.01)
    await asyncio.sleep(1.2)
    assert said == [True] and not any(task.done() for task in waiting), "the later one waits its turn"
    connection.execute("PRAGMA max_page_count = 100000")
    assert await asyncio.gather(*waiting) == [2, 3] and said == [True, False]
    connection.execute("PRAGMA max_page_count = 20")
    waiting = [asyncio.create_task(writer.write(put(size))) for size in (10**6, 10**6)]
    await asyncio.sleep(0.1)
    writer.stop_waiting()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, StoreError) and "disk is full" in str(result) for result in results)
    writer.close()


async def test_a_disk_that_goes_away_fails_the_write_though_writes_wait_for_room(tmp_path: Path) -> None:
    """How much room there is cannot be asked any more."""
    writer = Writer(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False), tmp_path / "gone" / "x")
    writer.wait_when_full(lambda full: None)

    def put(db: sqlite3.Connection) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorname = "SQLITE_IOERR_WRITE"  # as SQLite itself sets it
        raise error

    with pytest.raises(StoreError, match="could not be read or written"):
        await asyncio.wait_for(writer.write(put), 10)
    assert await writer.write(lambda db: 1) == 1
    writer.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_a_full_disk_fails_the_write_not_the_store(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_000_000))
    store = Store.open(small_disk / "aglite.db")
    try:
        await a_rollout(store)
        written: dict[int, int] = {}
        failures: list[StoreError] = []
        for number in range(400):
            batch = [a_call(prompt=range(n, n + 1000), response=[n]) for n in range(number * 4, number * 4 + 4)]
            results = await asyncio.gather(*(store.add_call(call) for call in batch), return_exceptions=True)
            for call, result in zip(batch, results, strict=True):
                if isinstance(result, int):
                    written[result] = call.response_ids[0]
                else:
                    assert isinstance(result, StoreError), result
                    failures.append(result)
            if failures:
                break
        assert failures and "aglite.db" in failures[0].message and failures[0].mend
        assert "full" in failures[0].message or "free space" in failures[0].mend
        # What was acknowledged is there, also while the disk is still full.
        assert {call.id: call.response_ids[0] for call in store.calls("r-1")}.items() >= written.items()
        ballast.unlink()
        late = await store.add_call(a_call(prompt=range(1000), response=[77]))
        await store.add_event("info", "run", "writing goes on")
        assert store.check() == []
        assert {call.id: call.response_ids[0] for call in store.calls("r-1")}.items() >= {**written, late: 77}.items()
    finally:
        store.close()
    again = Store.open(small_disk / "aglite.db")
    assert len(again.calls("r-1")) == len(written) + 1
    again.close()


WRITE_UNTIL_KILLED = """
import asyncio, os, sys
sys.path.insert(0, sys.argv[2])
from making_calls import a_call, a_rollout
from aglite.store import Store

async def conversation(store, name):
    await a_rollout(store, name, "g-" + name)
    base, length, turn = None, 0, 0
    while True:
        prompt = [turn] * 50
        given = {"base_id": base, "base_len": length} if base else {}
        message = {"role": "user", "content": f"{name} {turn}"}
        base = await store.add_call(a_call(name, prompt, [turn, turn], new_messages=[message], **given))
        length += 52
        os.write(1, f"{name} {turn} {base}\\n".encode())
        turn += 1

async def main():
    store = Store.open(sys.argv[1])
    await asyncio.gather(*(conversation(store, f"r-{number}") for number in range(8)))

asyncio.run(main())
"""


@pytest.mark.parametrize("round", range(3))
def test_every_acknowledged_call_survives_sigkill(tmp_path: Path, round: int) -> None:
    path = tmp_path / "aglite.db"
    child = subprocess.Popen(
        [sys.executable, "-c", WRITE_UNTIL_KILLED, str(path), str(Path(__file__).parent)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    first = b""
    while b"r-0 9 " not in first:  # it is at work
        first += child.stdout.readline()
    time.sleep(0.1 + random.Random(round).random() * 0.5)
    child.send_signal(signal.SIGKILL)
    lines = [line.split() for line in (first + child.stdout.read()).decode().splitlines()]
    child.wait()
    child.stdout.close()
    assert len(lines) > 50, "the child wrote too little for the test to mean anything"
    reader = Store.open(path, readonly=True)  # first of all: before a writer has tidied up
    assert len(reader.calls("r-0")) > 5
    reader.close()
    store = Store.open(path)
    assert store.check() == []
    stored = {f"r-{number}": store.calls(f"r-{number}") for number in range(8)}
    by_id = {call.id: (name, turn, call) for name, calls in stored.items() for turn, call in enumerate(calls)}
    for name, turn, call_id in lines:
        found_name, found_turn, call = by_id[int(call_id)]
        assert (found_name, found_turn) == (name, int(turn))
        assert call.response_ids.tolist() == [int(turn)] * 2
    for name, calls in stored.items():
        last = calls[-1]
        expected = [token for turn in range(len(calls)) for token in [turn] * 52][:-2]
        assert last.prompt_ids.tolist() == expected
        assert [m["content"] for m in store.messages(last)][-1] == f"{name} {len(calls) - 1}"
    # And it goes on from there.
    store.sync(store.add_call(a_call("r-0", [1], [2])))
    store.close()
