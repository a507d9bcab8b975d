from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon, running

from aglite.client import ControlClient, ControlError
from aglite.errors import AgliteError
from aglite.paths import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def daemon(run_dir: RunDir) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(run_dir, running())
    yield daemon
    daemon.end()


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def reason(run_dir: RunDir) -> str:
    with pytest.raises(ControlError) as caught:
        ControlClient(run_dir, timeout=60).status()
    assert isinstance(caught.value, AgliteError) and caught.value.mend
    return caught.value.reason


def test_reads_status_rollouts_and_one_rollout(daemon: FakeDaemon, run_dir: RunDir) -> None:
    client = ControlClient(run_dir)
    assert client.status()["run"] == "instruct"
    assert client.pid == os.getpid()
    rows = client.rollouts(state="done", limit=3)
    assert [row["state"] for row in rows] == ["done"] * 3
    assert client.rollout(rows[0]["id"])["call_rows"][0]["fork_cause"] == "first"


def test_posts_with_a_body(daemon: FakeDaemon, run_dir: RunDir) -> None:
    ControlClient(run_dir).post("stop", {"now": True})
    assert daemon.posted == [("stop", {"now": True})]


def test_no_supervisor_is_told_apart_from_a_dead_and_a_silent_one(run_dir: RunDir) -> None:
    assert reason(run_dir) == "absent"
    daemon = FakeDaemon(run_dir, running())
    daemon.go_silent()
    assert reason(run_dir) == "silent"
    run_dir.control.write_text(json.dumps({"url": daemon.url, "token": "x", "pid": dead_pid()}))
    assert reason(run_dir) == "dead"
    assert ControlClient(run_dir).pid is None


def test_half_written_control_file_counts_as_none(run_dir: RunDir) -> None:
    run_dir.create()
    run_dir.control.write_text('{"url": "http://127')
    assert reason(run_dir) == "absent"


def test_wrong_token(daemon: FakeDaemon, run_dir: RunDir) -> None:
    run_dir.control.write_text(json.dumps({"url": daemon.url, "token": "other", "pid": os.getpid()}))
    assert reason(run_dir) == "refused"


def test_refusal_keeps_the_supervisors_message_and_mend(daemon: FakeDaemon, run_dir: RunDir) -> None:
    daemon.refuse["/api/pause"] = (409, {"detail": "cannot pause now", "mend": "wait for the model"})
    with pytest.raises(ControlError) as caught:
        ControlClient(run_dir).post("pause")
    assert (caught.value.message, caught.value.mend) == ("cannot pause now", "wait for the model")


def test_restarted_supervisor_on_another_port_is_found(daemon: FakeDaemon, run_dir: RunDir) -> None:
    client = ControlClient(run_dir)
    client.status()
    daemon.go_silent()
    again = FakeDaemon(run_dir, running() | {"status": {"run": "again"}})
    assert client.status()["run"] == "again"
    again.end()


def test_events_go_on_from_the_cursor_over_broken_connections(daemon: FakeDaemon, run_dir: RunDir) -> None:
    # the fake daemon cuts the connection after two events
    events = list(islice(ControlClient(run_dir).events(after=3), 5))
    assert [event["id"] for event in events] == [4, 5, 6, 7, 8]
    cursors = [path for path in daemon.asked if "events" in path]
    assert cursors == ["/api/events?after=3", "/api/events?after=5", "/api/events?after=7"]


def test_events_end_with_the_supervisor(daemon: FakeDaemon, run_dir: RunDir) -> None:
    events = ControlClient(run_dir).events(after=12)
    assert [next(events)["id"], next(events)["id"]] == [13, 14]
    daemon.end()
    assert list(events) == []
