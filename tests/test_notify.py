"""A run that nobody watches tells somebody when it ends or needs a person, and is none the worse when it cannot."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mini_run import INTERRUPT, MiniRun

from aglite import doctor
from aglite.config import Notify, load_recipe
from aglite.notify import PATIENCE_S, Watch

SECRET = "xoxb-0123-very-secret"


class Listener:
    """A webhook on loopback: answers with the statuses it is given, the last one again and again."""

    def __init__(self) -> None:
        self.statuses = [204]
        self.messages: list[dict[str, Any]] = []
        self.asked = 0
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = listener.statuses.pop(0) if len(listener.statuses) > 1 else listener.statuses[0]
                listener.asked += 1
                if status < 300:
                    assert self.path == f"/hook/{SECRET}" and self.headers["Content-Type"] == "application/json"
                    listener.messages.append(body)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

        self._server: ThreadingHTTPServer | None = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook/{SECRET}"

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


@pytest.fixture
def hook(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> Listener:
    monkeypatch.setenv("HOOK", listener.url)
    return listener


def notes(run: MiniRun) -> list[tuple[str, str]]:
    return [(row["level"], row["text"]) for row in run.store().events(limit=10_000) if row["kind"] == "notify"]


def written(folder: Path) -> bytes:
    """All that a run has written."""
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_a_run_that_is_done_says_so_and_tries_again_until_it_is_heard(tmp_path: Path, hook: Listener) -> None:
    hook.statuses = [503, 200]
    run = MiniRun(tmp_path, trainer={"steps": 2}, notify={"url_env": "HOOK"})
    code, output = run.up()
    assert code == 0, output
    (message,) = hook.messages
    assert hook.asked == 2
    assert message["event"] == "done" and message["run"] == "mini"
    assert (message["step"], message["steps"]) == (2, 2)
    assert message["dir"] == str(run.run_dir.path)
    assert message["validation"] == run.store().evaluations()[-1]["result"]["mean"]
    assert "mini on " in message["text"] and "is done, step 2 of 2, validation 0." in message["text"]
    assert notes(run) == [("info", "127.0.0.1 was told: done")]
    assert SECRET not in output and SECRET.encode() not in written(run.run_dir.path)
    code, output = run.up()  # nothing is left to do: nobody is called
    assert code == 0 and len(hook.messages) == 1


def test_a_run_that_fails_says_why(tmp_path: Path, hook: Listener) -> None:
    grade = "def grade(task, rollout, workdir):\n    raise RuntimeError('no grades today')\n"
    run = MiniRun(tmp_path, grade=grade, notify={"url_env": "HOOK"})
    code, output = run.up()
    assert code == 1, output
    (message,) = hook.messages
    assert message["event"] == "failed" and "no grades today" in message["why"]
    assert message["text"].partition("\n")[2] == message["why"]


@pytest.mark.parametrize(
    ("status", "asked", "words"),
    [(404, 1, "HTTP status 404"), (302, 1, "HTTP status 302"), (500, 3, "HTTP status 500")],
)
def test_an_address_that_does_not_take_it_is_named_without_its_secret(
    tmp_path: Path, hook: Listener, status: int, asked: int, words: str
) -> None:
    hook.statuses = [status]
    run = MiniRun(tmp_path, trainer={"steps": 1}, evaluation={"before": False}, notify={"url_env": "HOOK"})
    code, output = run.up()
    assert code == 0, output
    assert hook.asked == asked
    assert notes(run) == [("warning", f"127.0.0.1 could not be told (done): {words}")]
    assert SECRET not in output and SECRET.encode() not in written(run.run_dir.path)


def test_nobody_at_the_address_does_not_keep_a_run_from_its_end(tmp_path: Path, hook: Listener) -> None:
    hook.close()
    run = MiniRun(tmp_path, trainer={"steps": 1}, evaluation={"before": False}, notify={"url_env": "HOOK"})
    code, output = run.up()
    assert code == 0 and "use it: aglite serve" in output
    ((level, text),) = notes(run)
    assert level == "warning" and "could not be told (done): no connection" in text


NOTE = """\
import json, os, pathlib, sys
message = json.load(sys.stdin)
with pathlib.Path("told.jsonl").open("a") as file:
    file.write(json.dumps([message["event"], os.environ["AGLITE_EVENT"], os.environ["AGLITE_TEXT"]]) + "\\n")
"""


def test_a_command_is_told_of_a_run_that_stands_still_and_of_its_stop(tmp_path: Path) -> None:
    run = MiniRun(
        tmp_path,
        program="import time\ntime.sleep(300)\n",
        agent={"limits": {"wall_s": 300}},
        evaluation={"before": False},
        notify={"command": ["python", "note.py"], "on": ["stalled", "stopped"], "stalled_after_s": 6},
    )
    (tmp_path / "recipe" / "note.py").write_text(NOTE)
    told = tmp_path / "recipe" / "told.jsonl"
    run.start()
    run.until(lambda _: told.exists() and told.read_text().endswith("\n"))
    run.until(lambda store: notes(run))
    # a slow machine may have stood still once before, while it started
    event, named, text = json.loads(told.read_text().splitlines()[-1])
    assert event == named == "stalled"
    assert "stands still" in text and re.search(r"nothing has moved for \d+:\d\d", text)
    run.signal(INTERRUPT)
    code, output = run.wait()
    assert code == 130, output
    *before, last = [json.loads(line)[0] for line in told.read_text().splitlines()]
    assert set(before) == {"stalled"} and last == "stopped"
    assert run.gone()


def test_a_command_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    run = MiniRun(
        tmp_path, trainer={"steps": 1}, evaluation={"before": False}, notify={"command": ["no-such-program", SECRET]}
    )
    code, output = run.up()
    assert code == 0, output
    ((level, text),) = notes(run)
    assert level == "warning" and text == "no-such-program could not be told (done): there is no such program"


def test_what_stands_still_is_told_once_until_it_moves() -> None:
    watch = Watch(stalled_after_s=100)
    assert watch.look(0, "a", "", held=False) == []
    assert watch.look(99, "a", "", held=False) == []
    assert watch.look(100, "a", "", held=False) == [("stalled", "nothing has moved for 1:40")]
    assert watch.look(500, "a", "", held=False) == []
    assert watch.look(501, "b", "", held=False) == []
    assert [kind for kind, _ in watch.look(601, "b", "", held=False)] == ["stalled"]


def test_what_a_person_holds_does_not_stand_still() -> None:
    watch = Watch(stalled_after_s=100)
    watch.look(0, "a", "", held=False)
    assert watch.look(200, "a", "", held=True) == []
    assert watch.look(250, "a", "", held=False) == []
    assert watch.look(300, "a", "", held=False) == [("stalled", "nothing has moved for 1:40")]


def test_what_is_in_the_way_is_told_when_it_does_not_go_away_by_itself() -> None:
    watch = Watch(stalled_after_s=10_000)
    assert watch.look(0, "a", "the disk is full", held=True) == []
    assert watch.look(PATIENCE_S - 1, "a", "", held=False) == []  # it went away
    assert watch.look(PATIENCE_S, "a", "the disk is full", held=True) == []
    assert watch.look(2 * PATIENCE_S, "a", "the disk is full", held=True) == [("paused", "the disk is full")]
    assert watch.look(3 * PATIENCE_S, "a", "the disk is full", held=True) == []
    watch.look(3 * PATIENCE_S + 1, "a", "", held=False)
    watch.look(3 * PATIENCE_S + 2, "a", "no Docker", held=False)
    assert watch.look(4 * PATIENCE_S + 2, "a", "no Docker", held=False) == [("paused", "no Docker")]


def test_settings_that_reach_nobody_are_refused() -> None:
    with pytest.raises(ValueError, match="reaches nobody; add `command`, `url` or `url_env`"):
        Notify(on=["done"])
    with pytest.raises(ValueError, match="not both"):
        Notify(url="https://a/b", url_env="HOOK")
    with pytest.raises(ValueError, match="write it like https://host/path"):
        Notify(url="hooks.example.com/x")


def test_doctor_looks_at_what_is_to_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    unset = doctor.notify(tmp_path, Notify(url_env="HOOK"))
    assert unset.status == "error" and "HOOK is not set" in unset.detail and "export HOOK=" in unset.mend
    monkeypatch.setenv("HOOK", f"https://hooks.example.com/{SECRET}")
    found = doctor.notify(tmp_path, Notify(url_env="HOOK"))
    assert found.status == "ok" and "hooks.example.com" in found.detail and SECRET not in found.detail
    missing = doctor.notify(tmp_path, Notify(command=["no-such-program"]))
    assert missing.status == "error" and "no-such-program" in missing.detail
    run = MiniRun(tmp_path, notify={"command": ["true"]})
    names = {check.name: check.status for check in doctor.checks(load_recipe(run.folder / "recipe"))}
    assert names["notify"] == "ok"
