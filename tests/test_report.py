"""The report says what the store says, opens from the disk alone, and lets nothing through that agents wrote."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sqlite3
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest

from aglite.errors import AgliteError
from aglite.paths import RunDir
from aglite.report.page import MOST_BLOCKS, labels_of, timeline, write_report
from aglite.report.read import Run, read_run
from aglite.report.svg import Box, Series, box_chart, line_chart, ticks
from aglite.store import CallRecord, Store, db
from aglite.store.old import readable
from aglite.training.scores import share_interval

VOID = {"meta", "link", "br", "hr", "img", "input"}
EVIL = """<script>alert(1)</script>"'&<img src=x onerror=alert(2)>{{ 7*7 }}\x00\x1b[31m"""


class Page(HTMLParser):
    """Tables by the id of what they stand in, and whether all that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._here = self._figure = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if "id" in given:
            self.ids.append(given["id"] or "")
        if tag == "table":
            self._here = given.get("id") or (self._figure if "figure" in self.open else "")
        if tag == "figure":
            self._figure = given["id"] or ""
        if tag == "tr":
            self.tables.setdefault(self._here, []).append([])
        if tag in ("td", "th"):
            self.tables[self._here][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[self._here][-1][-1] += data


def made(folder: Path, **more: object) -> RunDir:
    run = RunDir(folder)
    run.create()
    asyncio.run(fill(run, **more))
    return run


async def fill(
    run: RunDir, *, steps: int = 4, kind: str = "word", cause: str = "wall_time: x", lr: float = 0.1
) -> None:
    """A run of `steps` steps, 100 seconds each, that has ended; its start is at 1000."""
    store = Store.open(run.db)
    clock = mock.patch("time.time", lambda: now)
    now = 1000.0
    with clock:
        recipe = {
            "name": "words",
            "model": "m",
            "trainer": {"steps": steps, "lr": lr},
            "agent": {"env": {"KEY": "very-secret"}, "command": ["python", "agent.py"]},
        }
        await store.set_meta("manifest", {"recipe": recipe, "versions": {"aglite": "0.1"}})
        await store.set_phase("starting")
        now = 1010.0
        for number in range(steps + 1):
            await store.set_phase("rollout")
            rollout = f"r-{number}"
            await store.add_group(f"g-{number}", "t", "train", 1)
            await store.add_rollout(rollout, "t", f"g-{number}", "train", "local")
            await store.set_rollout_state(rollout, "starting", attempt=1)
            await store.add_call(
                CallRecord(rollout, 1, [1] * 7, 7, [2] * 5, [-0.5] * 5, [[number, 5]], "chat", "ok", now, now + 1)
            )
            began = now
            now += 10 * 2**number
            if number == 1:
                await store.set_rollout_state(rollout, "failed", cause=cause, reward=0.0)
            else:
                await store.set_rollout_state(rollout, "done", reward=1.0)
            now = began + 80
            await store.set_phase("training")
            now += 20
            if number:
                metrics = {
                    "reward_mean": number / 8,
                    "reward_std": 0.25,
                    "entropy": 2 - number / 10,
                    "kl_rollout": 0.001 * number,
                    "samples_per_rollout": 1 + number / 2,
                    "samples_per_rollout_max": 3,
                    "trained_tokens": 5,
                    "grad_norm": float("nan") if number == 2 else 1.5 * number,
                    "forks": {"edited": number},
                }
                await store.add_step(number, number, "applied", metrics, began, now)
            if number in (0, steps):
                evaluation = await store.start_evaluation(number, number)
                for task, reward in (("a", 0.0), ("b", number / 4)):
                    group = f"e-{number}-{task}"
                    await store.add_group(group, task, "val", 1, eval_id=evaluation)
                    await store.add_rollout(f"{group}-r", task, group, "val", "local")
                    await store.set_rollout_state(f"{group}-r", "done", reward=reward)
                mean = number / 8
                result = {"mean": mean, "stderr": 0.1, "low": mean - 0.2, "high": mean + 0.2, "n": 2}
                result |= {f"pass@{k}": share_interval([1.0, number / 4]) for k in (1, 2)}
                await store.finish_evaluation(evaluation, "done", {**result, "by_kind": {kind: 0.375}})
        await store.add_checkpoint(steps, steps, f"checkpoints/step-{steps}")
        await store.set_best_checkpoint(steps)
        await store.add_event("warning", "run", "careful: " + kind.replace("\ud83d", "?"))
        await store.set_phase("stopped")
    store.close()


@pytest.fixture
def report(tmp_path: Path):
    def write(*runs: RunDir) -> tuple[Page, str]:
        out = tmp_path / "report.html"
        write_report(runs, out)
        text = out.read_text()
        return Page(text), text

    return write


def facts(page: Page, table: str = "facts") -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in page.tables[table] if row}


def test_it_says_what_the_store_says(tmp_path: Path, report) -> None:
    run = made(tmp_path / "run")
    page, _ = report(run)
    told = facts(page)
    assert told["steps"] == ["4 of 4"] and told["state"] == ["finished"] and told["model"] == ["m"]
    assert told["training reward, first and last step"] == ["0.125 → 0.5"]
    assert told["validation before"] == ["0.000 (-0.200 to 0.200), 2 tasks"]
    assert told["validation last"] == ["0.500 (0.300 to 0.700), 2 tasks"]
    assert told["gain, task by task"][0].startswith("+0.500 (")
    assert told["best checkpoint"] == ["checkpoints/step-4"] and told["validation last, word"] == ["0.375"]
    assert told["rollouts"] == ["8 done, 1 failed"]
    store = Store.open(run.db, readonly=True)
    for figure, name in (("reward", "reward_mean"), ("entropy", "entropy"), ("rows", "samples_per_rollout")):
        shown = {float(row[0]): float(row[1]) for row in page.tables[figure][1:]}
        assert shown == {row["step"]: pytest.approx(row["metrics"][name], rel=1e-3) for row in store.steps()}
    store.close()
    assert page.tables["reward"][1] == ["1", "0.125", "-0.125 to 0.375"]
    assert page.tables["validation"][1:] == [["0", "0", "-0.2 to 0.2"], ["4", "0.5", "0.3 to 0.7"]]
    assert [row[0] for row in page.tables["pass"][1:]] == ["1", "2"]
    # 10, 20, 40, 80 and 160 s; quantiles are values that occurred
    assert page.tables["durations"][1] == ["words, training", "5", "10", "20", "40", "80", "160", "160"]
    cost = facts(page, "cost")
    assert cost["rollout, seconds"] == ["400 (78%)"] and cost["training, seconds"] == ["100 (20%)"]
    assert cost["starting, seconds"] == ["10 (2%)"]
    assert cost["calls, training"] == ["5"] and cost["sampled tokens, training"] == ["25"]
    assert cost["prompt tokens, training"] == ["35"] and cost["trained tokens"] == ["20"]
    assert facts(page, "causes")["wall_time"] == ["1"]
    assert page.tables["m0"][1:] == [["1", "1"], ["2", "2"], ["3", "3"], ["4", "4"]]  # forks.edited
    assert page.tables["m1"][1:] == [["1", "1.5"], ["2", "nan"], ["3", "4.5"], ["4", "6"]]  # grad_norm


def test_it_needs_nothing_but_itself(tmp_path: Path, report) -> None:
    page, text = report(made(tmp_path / "run"))
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    for _, given in page.tags:
        assert not any(name.startswith("on") or name in ("src", "href", "srcset") for name in given)
    assert "http://" not in text and "https://" not in text and "@import" not in text and "url(" not in text
    policy = next(given["content"] for tag, given in page.tags if given.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert "prefers-color-scheme: dark" in text and "@media print" in text


def test_charts_are_whole_and_have_accessible_names(tmp_path: Path, report) -> None:
    page, text = report(made(tmp_path / "a"), made(tmp_path / "b", steps=3))
    assert len(page.ids) == len(set(page.ids))
    charts = re.findall(r"<svg role.*?</svg>", text, re.DOTALL)
    assert len(charts) >= 9
    for chart in charts:
        parsed = ElementTree.fromstring(chart)
        if names := parsed.get("aria-labelledby"):
            ids = {element.get("id"): element.text for element in parsed}
            assert all(ids[name] for name in names.split())
        else:
            assert parsed.get("aria-label")


def test_runs_side_by_side(tmp_path: Path, report) -> None:
    page, text = report(made(tmp_path / "a"), made(tmp_path / "b", steps=2, lr=0.2))
    told = facts(page)
    assert page.tables["facts"][0] == ["", "a", "b"]
    assert told["steps"] == ["4 of 4", "2 of 2"]
    assert page.tables["reward"][0] == ["step", "a", "b"]
    assert page.tables["reward"][3] == ["3", "0.375", ""]
    assert facts(page, "settings") == {
        "": ["a", "b"],
        "trainer.steps": ["4", "2"],
        "trainer.lr": ["0.1", "0.2"],
    }
    assert text.count('class="lane"') == 2


def test_labels_tell_runs_apart() -> None:
    def named(name: str, folder: str) -> Run:
        run = mock.Mock()
        run.name, run.folder = name, folder
        return run

    assert labels_of([named("x", "runs/x"), named("y", "runs/y")]) == ["x", "y"]
    assert labels_of([named("x", "runs/x"), named("x", "runs/x2"), named("y", "r")]) == ["x", "x2", "y"]
    assert labels_of([named("x", "a/x"), named("x", "b/x")]) == ["x (1)", "x (2)"]


def test_nothing_that_others_wrote_is_taken_for_the_page(tmp_path: Path, report) -> None:
    page, text = report(made(tmp_path / "run", kind=EVIL, cause=EVIL))
    assert "script" not in {tag for tag, _ in page.tags} and "img" not in {tag for tag, _ in page.tags}
    assert "<script" not in text and "onerror=alert(2)&gt;" in text
    assert "\x00" not in text and "\x1b" not in text and "{{ 7*7 }}" in text and "49" not in facts(page)
    assert any(name.startswith("validation last, <script>") for name in facts(page))
    assert any(name.startswith("<script>") for name in facts(page, "causes"))


def test_half_a_character_does_not_break_it(tmp_path: Path, report) -> None:
    page, _ = report(made(tmp_path / "run", kind="half \ud83d here"))
    assert "validation last, half \\ud83d here" in facts(page)


def test_what_is_masked_stays_masked(tmp_path: Path, report) -> None:
    run = made(tmp_path / "run", kind="jane@example.org", cause="jane@example.org did it")
    store = Store.open(run.db)
    store.sync(store.set_meta("redact", {"named": ["emails"], "patterns": []}))
    store.close()
    _, text = report(run)
    assert "jane@" not in text and text.count("[redacted]") >= 3
    assert "very-secret" not in text and "(not shown)" in text


def test_a_run_that_is_going(tmp_path: Path, report) -> None:
    run = made(tmp_path / "run")
    store = Store.open(run.db)
    store.sync(store.set_phase("starting"))
    store.sync(store.set_phase("rollout"))
    run.control.write_text(json.dumps({"url": "http://127.0.0.1:1", "token": "t", "pid": os.getpid()}))
    page, _ = report(run)  # while the writer is open
    store.close()
    assert facts(page)["state"] == ["going (rollout)"]
    run.control.unlink()
    assert facts(report(run)[0])["state"] == ["died while rollout"]


def test_a_run_before_its_first_step(tmp_path: Path, report) -> None:
    run = RunDir(tmp_path / "run")
    Store.open(run.db).close()
    page, text = report(run)
    assert facts(page)["steps"] == ["0 of 0"] and "Nothing has been trained or evaluated yet." in text


def test_an_old_database_is_read_and_left_as_it_is(tmp_path: Path, report) -> None:
    migrations = tmp_path / "migrations"
    migrations.mkdir()
    for script in sorted(db.MIGRATIONS.glob("*.sql"))[:2]:
        (migrations / script.name).write_text(script.read_text())
    run = RunDir(tmp_path / "old")
    run.path.mkdir()
    writer = db.open_writer(run.db, migrations)
    writer.execute("INSERT INTO meta VALUES ('manifest', ?)", (json.dumps({"recipe": {"name": "old"}}),))
    metrics = json.dumps({"reward_mean": 0.5, "reward_std": 0.1})
    writer.execute("INSERT INTO steps VALUES (1, 1, 1, 'applied', ?, 1, 2)", (metrics,))
    result = json.dumps({"mean": 0.25, "stderr": 0.1, "n": 4, "by_kind": {}})
    writer.execute("INSERT INTO evaluations VALUES (1, 1, 1, 'val', 'done', ?, 1, 2)", (result,))
    writer.close()
    page, _ = report(run)
    assert page.tables["reward"][1] == ["1", "0.5", "0.4 to 0.6"]
    assert facts(page)["validation last"] == ["0.250, 4 tasks"]
    assert sqlite3.connect(run.db).execute("PRAGMA user_version").fetchone() == (2,)
    assert not list(run.path.glob("*.bak"))


def test_a_new_database_is_not_copied(tmp_path: Path) -> None:
    run = made(tmp_path / "run", steps=1)
    with readable(run.db) as store:
        assert store.path == run.db


def test_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(AgliteError, match="there is no database"):
        write_report([RunDir(tmp_path / "none")], tmp_path / "out.html")
    run = made(tmp_path / "run", steps=1)
    with pytest.raises(AgliteError, match=r"nowhere/out\.html could not be written: No such file"):
        write_report([run], tmp_path / "nowhere" / "out.html")


def test_time_that_a_run_was_stopped_is_no_part_of_its_phases(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    store = Store.open(run.db)
    times = iter((10.0, 20.0, 50.0, 5000.0, 5010.0, 5015.0))
    with mock.patch("time.time", lambda: next(times)):
        for phase in ("starting", "rollout", "stopped", "starting", "rollout", "training"):
            store.sync(store.set_phase(phase))
    times = iter((5020.0, 90_000.0, 90_001.0))
    with mock.patch("time.time", lambda: next(times)):
        store.sync(store.add_event("info", "run", "a last word"))  # then it is killed, and goes on long after
        for phase in ("starting", "stopped"):
            store.sync(store.set_phase(phase))
    store.close()
    read = read_run(run)
    assert read.seconds == {"starting": 21.0, "rollout": 35.0, "training": 5.0}
    assert [phase["start"] for phase in read.phases] == [0, 10, 40, 50, 55, 60]


def test_a_long_timeline_is_drawn_in_slices() -> None:
    run = mock.Mock()
    run.phases = [
        {"phase": ("rollout", "training")[place % 2], "start": 10.0 * place, "seconds": 10.0} for place in range(1000)
    ]
    blocks = timeline(run)
    assert len(blocks) <= MOST_BLOCKS
    for phase in ("rollout", "training"):
        assert sum(block["width"] for block in blocks if block["phase"] == phase) == pytest.approx(50, abs=0.1)
    ends = [block["left"] + block["width"] for block in blocks]
    assert all(block["left"] >= end - 1e-3 for block, end in zip(blocks[1:], ends, strict=False))
    assert ends[-1] == pytest.approx(100, abs=0.01)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.33, 0.41, [0.32, 0.34, 0.36, 0.38, 0.4, 0.42]),
        (-3, 12, [-5, 0, 5, 10, 15]),
        (0, 12_345, [0, 5000, 10_000, 15_000]),
        (2, 2, [2, 2.5, 3, 3.5, 4]),
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_ticks_are_round_and_hold_all(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_what_is_not_finite_is_left_out() -> None:
    chart = str(line_chart("c", "t", [Series("s", 0, [1, 2, 3], [1.0, float("nan"), 2.0])], "step"))
    assert chart.count("<circle") == 2 and "nan" not in chart and "inf" not in chart
    assert line_chart("c", "t", [Series("s", 0, [1], [float("nan")])], "step") == ""
    ElementTree.fromstring(str(line_chart("c", "t", [Series("s", 0, [5], [0.0])], "step")))


def test_a_wide_distribution_is_drawn_on_a_logarithmic_axis() -> None:
    chart = str(box_chart("c", "t", [Box("a", 0, [0.1, 1, 2, 5, 90], 9), Box("b", 1, [1, 2, 3, 4, 5], 9)], "seconds"))
    marks = re.findall(r'class="x" x="([\d.]+)"[^>]*>([\d.]+)<', chart)
    assert [text for _, text in marks] == ["0.1", "1", "10", "100"]
    at = [float(x) for x, _ in marks]
    assert at[1] - at[0] == pytest.approx(at[2] - at[1], abs=0.2) == pytest.approx(at[3] - at[2], abs=0.2)
