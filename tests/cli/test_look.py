from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import time

import pyarrow.parquet
import pytest
from cli_done import Aglite
from fake_daemon import FakeDaemon
from recorded_run import DONE, FAILED, WAITING

from aglite.lock import hold
from aglite.paths import RunDir
from aglite.store import Store, db


def test_rollouts_of_a_finished_run_newest_first(aglite: Aglite, finished: RunDir) -> None:
    lines = aglite("rollouts").stdout.splitlines()
    assert lines[0].split()[:3] == ["id", "task", "state"]
    assert lines[1].split()[0] == WAITING
    assert "wall time limit" in next(line for line in lines if FAILED in line)


def test_rollouts_filtered(aglite: Aglite, finished: RunDir) -> None:
    rows = json.loads(aglite("rollouts", "--state", "failed", "--json").stdout)
    assert [row["id"] for row in rows] == [FAILED]
    assert len(json.loads(aglite("rollouts", "--limit", "2", "--json").stdout)) == 2
    assert aglite("rollouts", "--state", "grading").stdout == "no rollouts\n"


def test_rollouts_of_a_run_that_is_going_come_from_its_supervisor(aglite: Aglite, daemon: FakeDaemon) -> None:
    rows = json.loads(aglite("rollouts", "--state", "running", "--json").stdout)
    assert rows and all(row["state"] == "running" for row in rows)
    assert any(path.startswith("/api/rollouts?state=running") for path in daemon.asked)


def test_unknown_state_names_the_known_ones(aglite: Aglite, finished: RunDir) -> None:
    done = aglite("rollouts", "--state", "runing")
    assert done.returncode == 2 and "grading" in done.stderr


def test_show_tells_calls_and_what_was_said(aglite: Aglite, finished: RunDir) -> None:
    text = aglite("show", DONE).stdout
    assert "reward 1.00   word 1.00" in text
    assert "call 1: first" in text and "call 2: continues call 1" in text
    # what the second call repeats of the first is not said twice
    assert text.count("Say a word with an a in it.") == 1
    assert text.count("boat") == 1 and "Another one." in text
    assert "sample trained in step 1: call 1, 2; 3 of 7 tokens, advantage +0.700" in text
    assert "response:" not in text


def test_show_tokens(aglite: Aglite, finished: RunDir) -> None:
    text = aglite("show", DONE, "--tokens").stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "0–2 prompt: 1 2 3" in lines and "0–4: recorded before" in lines and "5 prompt: 6" in lines
    assert lines.index("3 v0 -0.5000 4") + 1 == lines.index("4 v0 -0.5000 5") and "6 v0 -0.5000 7" in lines
    begin = lines.index("0–2 mask 0")
    assert lines[begin + 1 : begin + 4] == [
        "3–4 mask 1 v0, mean logprob -0.5000",
        "5 mask 0",
        "6 mask 1 v0, mean logprob -0.5000",
    ]
    detail = json.loads(aglite("show", DONE, "--tokens", "--json").stdout)
    call, sample = detail["call_rows"][1], detail["sample_rows"][0]
    assert call["prompt_ids"] == [1, 2, 3, 4, 5, 6] and call["logprobs"] == [-0.5] and call["versions"] == [[0, 1]]
    assert sample["input_ids"] == [1, 2, 3, 4, 5, 6, 7] and sample["loss_mask"] == [0, 0, 0, 1, 1, 0, 1]


def test_show_tokens_ends_with_the_forest(aglite: Aglite, finished: RunDir) -> None:
    text = aglite("show", DONE, "--tokens").stdout
    assert text[text.index("forest") :].splitlines() == [
        "forest: 2 calls in 1 trees, 1 samples",
        "  call 1  first: 3 + 2 tokens, trained in sample 1",
        "  └─ call 2  continues: 1 + 1 tokens, trained in sample 1",
    ]


def test_part_of_an_id_is_enough_if_it_is_the_only_one(aglite: Aglite, finished: RunDir) -> None:
    assert FAILED in aglite("show", "r-bb").stdout
    assert FAILED in aglite("show", "bb").stdout
    two = aglite("show", "r-aa")
    assert two.returncode == 1 and "fits 2 rollouts" in two.stderr
    none = aglite("show", "r-ff")
    assert none.returncode == 1 and "no rollout r-ff" in none.stderr
    assert "there is no rollout r-0123456789" in aglite("show", "r-0123456789").stderr


def test_logs_are_passed_on_byte_for_byte(aglite: Aglite, finished: RunDir) -> None:
    command = [sys.executable, "-m", "aglite", "logs", DONE, "--dir", str(finished.path)]
    assert subprocess.run(command, capture_output=True).stdout == b"hello from the agent\n\xff raw byte\n"
    missing = aglite("logs", WAITING)
    assert missing.returncode == 1 and "its agent has not been started" in missing.stderr
    assert "attempts 1 to 1" in aglite("logs", DONE, "--attempt", "3").stderr


def test_logs_are_followed_through_attempts_until_the_rollout_has_ended(finished: RunDir) -> None:
    store = Store.open(finished.db)

    def state(name: str, attempt: int) -> None:
        asyncio.run(store.set_rollout_state(WAITING, name, attempt=attempt))

    state("running", 1)
    first, second = finished.rollout_log(WAITING, 1), finished.rollout_log(WAITING, 2)
    first.write_bytes(b"one\ntw")
    command = [sys.executable, "-m", "aglite", "logs", "-f", WAITING, "--dir", str(finished.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"one\n"
        with first.open("ab") as log:
            log.write(b"o\nlast")
        assert process.stdout.readline() == b"two\n"
        state("queued", 1)
        time.sleep(0.5)
        assert process.poll() is None, "another attempt may come"
        state("running", 2)
        second.write_bytes(b"again\n")
        assert process.stdout.readline() == b"lastagain\n"
        state("done", 2)
        assert process.wait(60) == 0
        assert process.stderr and process.stderr.read() == b"--- attempt 2 ---\n"
    store.close()


def test_causes_are_counted_below_the_table_and_in_the_status(aglite: Aglite, finished: RunDir) -> None:
    store = Store.open(finished.db)
    asyncio.run(store.set_rollout_state(FAILED, "failed", "wall_time: 120 s"))
    asyncio.run(store.set_rollout_state(WAITING, "error", "launch: no memory", 3))
    assert store.counts_by_cause() == {"launch": 1, "wall_time": 1}
    assert store.counts_by_cause([FAILED]) == {"wall_time": 1}
    store.close()
    last = aglite("rollouts").stdout.splitlines()[-1]
    assert last == "ended other than well: 1 launch (infrastructure), 1 wall_time (policy)"
    assert "causes      1 launch, 1 wall_time" in aglite("status").stdout


@pytest.mark.parametrize(("what", "rows"), [("samples", 2), ("calls", 3), ("rollouts", 4)])
def test_export_in_both_formats(aglite: Aglite, finished: RunDir, what: str, rows: int) -> None:
    lines, table = finished.path / "out.jsonl", finished.path / "out.parquet"
    assert aglite("export", "--what", what, "--out", str(lines)).returncode == 0
    done = aglite("export", "--what", what, "--format", "parquet", "--out", str(table))
    assert done.returncode == 0 and f"{rows} {what} written" in done.stderr
    assert len(lines.read_text().splitlines()) == pyarrow.parquet.read_table(table).num_rows == rows


def test_exported_sample_is_the_designs_form(aglite: Aglite, finished: RunDir) -> None:
    first = json.loads(aglite("export", "--out", "-").stdout.splitlines()[0])
    assert first["input_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert first["loss_mask"] == [0, 0, 0, 1, 1, 0, 1]
    assert (first["advantage"], first["weight"]) == (0.7, 0.1)


def test_export_refuses_what_it_cannot_write(aglite: Aglite, finished: RunDir) -> None:
    assert aglite("export", "--what", "tokens", "--out", "x").returncode == 2
    done = aglite("export", "--out", "/proc/x.jsonl")
    assert done.returncode == 1 and done.stderr.startswith("aglite: /proc/x.jsonl")


def test_in_a_run_directory_that_run_is_meant(
    aglite: Aglite, finished: RunDir, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "instruct" in aglite("status").stdout, "the one that is going"
    monkeypatch.chdir(finished.path)
    assert "words" in aglite("status").stdout
    assert json.loads(aglite("rollouts", "--json").stdout)[0]["task_id"].startswith("t-")


def test_db_check(aglite: Aglite, finished: RunDir) -> None:
    assert "is whole" in aglite("db", "check").stdout
    database = sqlite3.connect(finished.db)
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    data = bytearray(finished.db.read_bytes())
    data[4096 * 3 : 4096 * 8] = b"\x55" * 4096 * 5
    finished.db.write_bytes(data)
    assert aglite("db", "check").returncode == 1


def test_db_vacuum_shrinks_and_keeps(aglite: Aglite, finished: RunDir) -> None:
    shown = aglite("rollouts", "--json").stdout
    database = sqlite3.connect(finished.db)
    database.execute("CREATE TABLE filler AS SELECT zeroblob(2000000) AS hollow")
    database.execute("DROP TABLE filler")
    database.commit()
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    before = finished.db.stat().st_size
    assert "before" in aglite("db", "vacuum").stdout
    assert finished.db.stat().st_size < before - 1_900_000
    assert aglite("rollouts", "--json").stdout == shown


def test_db_vacuum_keeps_off_a_live_run(aglite: Aglite, finished: RunDir) -> None:
    with hold(finished):
        done = aglite("db", "vacuum")
    assert done.returncode == 1 and "in use by another aglite" in done.stderr


def test_closed_pipe_is_no_error(finished: RunDir) -> None:
    command = f"{sys.executable} -m aglite rollouts --dir {finished.path} | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["status"], ["rollouts"], ["steps"], ["show", "r-1"], ["logs", "r-1"]])
def test_a_run_of_an_older_aglite_is_read_and_left_as_it_is(aglite: Aglite, tmp_path, command: list[str]) -> None:
    migrations = tmp_path / "migrations"
    migrations.mkdir()
    for script in sorted(db.MIGRATIONS.glob("*.sql"))[:2]:
        (migrations / script.name).write_text(script.read_text())
    run = RunDir(tmp_path / "runs" / "old")
    run.path.mkdir(parents=True)
    writer = db.open_writer(run.db, migrations)
    writer.execute("INSERT INTO meta VALUES ('manifest', ?)", (json.dumps({"recipe": {"name": "older"}}),))
    writer.execute(
        "INSERT INTO steps VALUES (1, 1, 1, 'applied', ?, 1, 2)", (json.dumps({"reward_mean": 0.5, "reward_std": 0.1}),)
    )
    columns = "id, task_id, split, state, attempt, backend, created_at"
    writer.execute(f"INSERT INTO rollouts ({columns}) VALUES ('r-1', 'task-7', 'train', 'done', 1, 'local', 1)")
    writer.close()
    run.logs.mkdir(exist_ok=True)
    done = aglite(*command, "--dir", str(run.path))
    assert "schema" not in done.stderr
    if command[0] != "logs":
        assert done.returncode == 0 and any(word in done.stdout for word in ("older", "task-7", "0.50")), done
    assert sqlite3.connect(run.db).execute("PRAGMA user_version").fetchone() == (2,)
