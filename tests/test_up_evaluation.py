"""Evaluation in a run: the best checkpoint, the end when nothing gets better, evaluation on demand."""

import pytest
from mini_run import MiniRun
from test_up import live_steps

SCORES = [0.1, 0.2, 0.9, 0.4, 0.5, 0.3, 0.6]
"""Of the untrained model, then after each step."""

GRADE = f"""
import os, pathlib
def grade(task, rollout, workdir):
    if not task["id"].startswith("val"):
        return int(rollout["id"][2:], 16) % 997 / 997
    counter = pathlib.Path(__file__).with_name("graded")  # two tasks an evaluation
    with counter.open("ab", buffering=0) as file:
        file.write(b".")
    return {SCORES}[(counter.stat().st_size - 1) // 2]
"""


@pytest.fixture
def run(tmp_path):
    return MiniRun(
        tmp_path,
        grade=GRADE,
        algorithm={"mode": "sync"},
        agent={"concurrency": 2},
        trainer={"steps": 6, "checkpoint_every": 9, "keep_last": 1},
        evaluation={"every": 1},
        script={"train_s": 0.05},
    )


def evaluated(store):
    return [row["result"]["mean"] for row in store.evaluations() if row["state"] == "done"]


def test_the_best_is_kept_though_no_checkpoint_was_due(run):
    code, output = run.up()
    assert code == 0, output
    store = run.store()
    assert evaluated(store) == pytest.approx(SCORES)
    kept = {row["step"]: row["best"] for row in store.checkpoints() if row["state"] == "kept"}
    assert kept == {2: 1, 6: 0}
    assert {path.name for path in run.run_dir.checkpoints.iterdir()} == {"step-2", "step-6"}
    assert "step-2 (the best so far, 0.900)" in output
    assert f"did best in validation: {run.run_dir.checkpoints / 'step-2'}" in output
    assert "task by task +0.500 (95%: +0.500 to +0.500)" in output
    status = run.json("status", "--dir", str(run.run_dir.path))
    assert status["best"] == {"step": 2, "mean": pytest.approx(0.9), "path": "checkpoints/step-2"}
    assert "best: 0.90 in checkpoints/step-2" in run.aglite("status", "--dir", str(run.run_dir.path)).stdout


def test_a_run_ends_when_nothing_gets_better(run):
    code, output = run.up("--set", "evaluation.patience=2")
    assert code == 0, output
    assert "ended early after step 4: 2 evaluations since step 2 (0.900) were not better" in output
    assert live_steps(run.store()) == [1, 2, 3, 4]
    assert (run.run_dir.checkpoints / "step-4" / "aglite.json").is_file()
    code, output = run.up("--set", "evaluation.patience=2")
    assert code == 0 and "the run ended early after step 4" in output and "evaluation.patience=null" in output
    assert live_steps(run.store()) == [1, 2, 3, 4]
    code, output = run.up()
    assert code == 0, output
    assert live_steps(run.store()) == [1, 2, 3, 4, 5, 6] and evaluated(run.store()) == pytest.approx(SCORES)
    assert {path.name for path in run.run_dir.checkpoints.iterdir()} == {"step-2", "step-6"}


def test_patience_wants_evaluations(run):
    code, output = run.up("--set", "evaluation.patience=2", "--set", "evaluation.every=0")
    assert code == 2 and "evaluation.patience: nothing is evaluated before the end" in output


def test_on_demand_with_pass_at_k(tmp_path):
    run = MiniRun(
        tmp_path,
        sampling={"val": {"temperature": 0.5}},
        evaluation={"before": False, "rollouts_per_task": 3, "solved_at": 0.5},
        trainer={"steps": 200},
    )
    run.start()
    run.until(lambda store: live_steps(store))
    run.client.post("evaluate")
    (row,) = run.until(lambda store: [row for row in store.evaluations() if row["state"] == "done"])
    assert row["step"] >= 1
    rewards = run.store().evaluation_rewards(row["id"])
    assert {task: len(each) for task, each in rewards.items()} == {"val-0": 3, "val-1": 3}
    solved = [sum(reward >= 0.5 for reward in each) for each in rewards.values()]
    assert row["result"]["pass@1"]["mean"] == pytest.approx(sum(solved) / 6)
    assert row["result"]["pass@3"]["mean"] == pytest.approx(sum(count > 0 for count in solved) / 2)
    assert row["result"]["rollouts_per_task"] == 3
    assert run.aglite("down", "--now", "--dir", str(run.run_dir.path)).returncode in (0, 1)
    run.wait()


def test_greedy_rollouts_are_said_to_be_all_the_same(tmp_path):
    run = MiniRun(tmp_path)
    done = run.aglite("eval", "recipe", "--n", "2", "--json")
    assert done.returncode == 0 and "greedy" in done.stderr and "set it above 0" in done.stderr
    assert "greedy" not in run.aglite("eval", "recipe", "--json").stderr
