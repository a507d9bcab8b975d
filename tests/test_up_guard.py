"""A run that is about to be lost is held, says why, and goes on when somebody wants it to."""

from __future__ import annotations

from mini_run import INTERRUPT, MiniRun

GUARD = {"window": 1}
COLLAPSE = {"train": [{"entropy": 1.0}, {"entropy": 0.9}, {"entropy": 0.01}]}


def held(store):
    return store.phases() and store.phases()[-1]["phase"] == "paused"


def steps(store):
    return [row["step"] for row in store.steps() if row["state"] != "rolled_back"]


def status(run: MiniRun) -> dict:
    return run.json("status", "--dir", str(run.run_dir.path))


def test_a_collapse_pauses_the_run_also_across_a_restart(tmp_path):
    run = MiniRun(tmp_path, script=COLLAPSE, guard=GUARD, trainer={"steps": 5}, algorithm={"mode": "sync"})
    run.start()
    run.until(held)
    message = status(run)["message"]
    assert message.startswith("paused: entropy went from 1 to 0.01") and "aglite resume" in message
    assert "lower trainer.lr" in message and steps(run.store()) == [1, 2, 3]
    assert "checkpoints/step-2" in message
    run.signal(INTERRUPT)
    code, output = run.wait()
    assert code == 130 and "step 3: entropy went from 1 to 0.01" in output
    # what it saw is in the checkpoint: the next start is held at once, without a further step
    run.start()
    run.until(held)
    assert status(run)["message"] == message and steps(run.store()) == [1, 2, 3]
    assert run.aglite("resume", "--dir", str(run.run_dir.path)).returncode == 0
    code, output = run.wait()
    assert code == 0, output
    # compared with what it was when it was let go on, nothing runs away
    assert steps(run.store()) == [1, 2, 3, 4, 5] and "step 5: entropy" not in output


def test_it_only_warns_where_the_recipe_says_so_and_counts_what_is_not_finite(tmp_path):
    spoiled = {"train": [{"applied": False, "skipped": 1, "updates": 0}]}
    run = MiniRun(tmp_path, script=spoiled, guard={"action": "warn", "not_finite": 2}, trainer={"steps": 3})
    code, output = run.up()
    assert code == 0, output
    assert "2 updates in a row had a loss or gradient that is not finite" in output
    store = run.store()
    assert [row["version"] for row in store.steps()] == [0, 0, 0] and not any(
        phase["phase"] == "paused" for phase in store.phases()
    )


def test_rows_are_counted_and_a_worker_that_loses_some_is_no_worker(tmp_path):
    run = MiniRun(tmp_path, script={"train": [{"trained_tokens": 3}]}, trainer={"steps": 1})
    code, output = run.up()
    assert code == 1 and "the model worker trained 3 tokens of 56 that it was given" in output


def test_tasks_rest_and_groups_of_equal_rewards_are_replaced(tmp_path):
    grade = """
import json, pathlib
def grade(task, rollout, workdir):
    return 1.0 if int(task["id"].split("-")[1]) % 2 else int(rollout["id"][-1], 16) / 16
"""
    run = MiniRun(
        tmp_path,
        grade=grade,
        tasks={"rest_solved_after": 1, "rest_epochs": 1},
        algorithm={"mode": "sync", "dynamic_sampling": 4},
        trainer={"steps": 4},
    )
    code, output = run.up()
    assert code == 0, output
    assert "rests for 1 passes over the tasks: solved by every rollout of its last group" in output
    store = run.store()
    metrics = [row["metrics"] for row in store.steps()]
    aside = sum(each["groups_set_aside"] for each in metrics)
    assert aside > 0 and all(
        each["rows_by_cause"]["first"] == 4 for each in metrics if not each["zero_advantage_groups"]
    )
    by_task = run.json("tasks", "--dir", str(run.run_dir.path))
    solved = [task for task in by_task if task["solved"] == 1]
    assert solved and all(int(task["task_id"].split("-")[1]) % 2 for task in solved)
    assert sum(len(task["over_time"]) for task in by_task) == 4 * 2 + aside
    flags = [row["flags"] for row in store.rollouts() if "set_aside" in row["flags"]]
    assert len(flags) == 2 * aside
    # a task that was solved in the first pass is not met in the second: 8 steps' worth of tasks are no more
    resting = [task["task_id"] for task in by_task if task["resting"]]
    assert resting


def test_a_validation_reward_that_falls_pauses_the_run(tmp_path):
    seen = tmp_path / "graded"
    grade = f"""
import os, zlib
def grade(task, rollout, workdir):
    if not task["id"].startswith("val"):
        return (zlib.crc32(rollout["id"].encode()) % 100) / 100
    file = os.open({str(seen)!r}, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(file, b".")
    return float(os.fstat(file).st_size <= 12)
"""
    run = MiniRun(tmp_path, grade=grade, evaluation={"every": 1, "tasks": 12}, trainer={"steps": 4})
    run.start()
    run.until(held)
    assert status(run)["message"].startswith("paused: the validation reward fell from 1.00 to 0.00")
    assert 1 <= len(steps(run.store())) < 4
    assert run.aglite("resume", "--dir", str(run.run_dir.path)).returncode == 0
    code, output = run.wait()
    assert code == 0 and steps(run.store()) == [1, 2, 3, 4], output


def test_measure_samples_every_task_and_prints_the_histogram(tmp_path):
    grade = """
import os
def grade(task, rollout, workdir):
    number = int(task["id"].split("-")[1])
    return 1.0 if number < 3 else 0.0 if number < 10 else int(rollout["id"][-1], 16) % 2 * 1.0
"""
    run = MiniRun(tmp_path, grade=grade)
    done = run.aglite("measure", "recipe", "--n", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "12 tasks of train, 24 rollouts; solved in"
    counts = {line[2:15].strip(): int(line.split()[-1]) for line in lines[1:7]}
    assert sum(counts.values()) == 12 and counts["never solved"] >= 7 and counts["always solved"] >= 3
    assert any(line.startswith("pass@2") for line in lines)
    result = run.json("measure", "recipe", "--n", "3", "--tasks", "4")
    assert result["tasks"] == 4 and result["by_task"]["train-0"] == {"n": 3, "solved": 3, "mean": 1.0}
    assert result["histogram"] == {name: 0 for name in result["histogram"]} | {"never solved": 1, "always solved": 3}
    assert result["teaching"] == 0.0
