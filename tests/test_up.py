"""`aglite up` from start to end with a scripted engine: real processes, sockets, store; only the model is made up."""

import json
import os
import signal
import socket
import stat
import time
from pathlib import Path

import pytest
from mini_run import INTERRUPT, MiniRun, held

from aglite.store import Store


def live_steps(store):
    return [row["step"] for row in store.steps() if row["state"] == "applied"]


def untangled(store: Store) -> None:
    """Whatever happened, a finished run's store must add up."""
    trained = {}
    for group in store.groups(split="train"):
        if group["state"] == "trained":
            assert group["step"] in live_steps(store)
            trained.setdefault(group["step"], []).append(group)
    for step, groups in trained.items():
        assert len(groups) == 2, f"step {step} trained {len(groups)} groups"
        tasks = [group["task_id"] for group in groups]
        assert len(set(tasks)) == len(tasks)
    versions = [row["version"] for row in store.policy_versions()]
    assert len(set(versions)) == len(versions)
    assert store.counts_by_state()["running"] == store.counts_by_state()["grading"] == 0


def test_a_run_from_start_to_end(tmp_path):
    run = MiniRun(tmp_path, held_step=2)
    run.start()
    run.until(lambda store: live_steps(store))
    control = json.loads(run.run_dir.control.read_text())
    assert control["pid"] == run.process.pid
    assert stat.S_IMODE(os.stat(run.run_dir.control).st_mode) == 0o600
    status = run.json("status", "--dir", str(run.run_dir.path))
    assert status["steps"] == 3 and status["run"] == "mini"
    run.go()
    code, output = run.wait()
    assert code == 0, output
    assert "before" in output and "after" in output and "checkpoints/step-3" in output
    assert not run.run_dir.control.exists()
    assert run.gone()
    with_store = run.store()
    assert live_steps(with_store) == [1, 2, 3]
    untangled(with_store)
    assert [row["step"] for row in with_store.evaluations() if row["state"] == "done"] == [0, 3]
    assert [row["path"] for row in with_store.checkpoints() if row["state"] == "kept"][-1] == "checkpoints/step-3"
    assert (run.run_dir.checkpoints / "step-3" / "aglite.json").is_file()
    for step in with_store.steps():
        assert step["metrics"]["rollouts"] == 4
        assert step["metrics"]["logprob_gap_mean"] == 0
        assert {cause: count for cause, count in step["metrics"]["forks"].items() if count} == {
            "first": 4,
            "continued": 4,
        }
    finished = run.json("status", "--dir", str(run.run_dir.path))
    assert [(point["step"], point["continued"]) for point in finished["forks"]] == [(1, 4), (2, 4), (3, 4)]
    # what was trained is what was sampled: each sampled token of each rollout, once
    for rollout in with_store.rollouts(state="done"):
        if rollout["split"] == "train":
            sampled = sum(len(call.response_ids) for call in with_store.calls(rollout["id"]))
            assert rollout["trained_tokens"] == rollout["sampled_tokens"] == sampled
            assert rollout["calls"] == 2 and rollout["samples"] == 1  # the second turn continues the first's tokens
    manifest = with_store.meta("manifest")
    assert manifest["recipe"]["trainer"]["steps"] == 3 and manifest["versions"]["aglite"]
    again, said = run.up()
    assert again == 0 and "all 3 steps are done" in said


def test_more_steps_after_the_end(tmp_path):
    run = MiniRun(tmp_path)
    assert run.up("--steps", "1")[0] == 0
    store = Store.open(run.run_dir.db)
    manifest = store.meta("manifest")
    del manifest["recipe"]["trainer"]["lr_schedule"]  # as an earlier aglite, which had no such setting, wrote it
    store.sync(store.set_meta("manifest", manifest))
    store.close()
    code, output = run.up("--steps", "2", "--set", "trainer.lr_schedule=linear")
    assert code == 1 and 'trainer.lr_schedule was "constant" and is now "linear"' in output
    code, output = run.up("--steps", "2")
    assert code == 0 and "going on from step-1" in output
    assert live_steps(run.store()) == [1, 2]
    untangled(run.store())


def test_interrupted_and_gone_on_with(tmp_path):
    run = MiniRun(tmp_path, trainer={"steps": 6}, script={"latency_s": 0.05}, held_step=4)
    run.start()
    run.until(lambda store: len(live_steps(store)) >= 2 and store.counts_by_state()["running"])
    run.signal(INTERRUPT)
    run.go()
    code, output = run.wait()
    assert code == 130, output
    assert "stopping: waiting for" in output and "stopped after step" in output
    assert run.gone()
    before = run.store()
    steps = live_steps(before)
    unfinished = {row["id"] for row in before.rollouts(state="queued")}
    complete = {row["id"] for row in before.groups(state="complete", split="train")}
    assert unfinished, "in-flight rollouts wait for the next start"
    code, output = run.up()
    assert code == 0, output
    assert f"going on from step-{steps[-1]}" in output
    after = run.store()
    assert live_steps(after) == [1, 2, 3, 4, 5, 6]
    untangled(after)
    assert all(row["state"] == "applied" for row in after.steps()), "a clean stop loses no step"
    rows = {row["id"]: row for row in after.rollouts()}
    assert all(rows[name]["state"] == "done" and rows[name]["attempt"] == 2 for name in unfinished)
    assert complete <= {row["id"] for row in after.groups(state="trained")}
    # the order of tasks is the one of an undisturbed run
    other = MiniRun(tmp_path / "other", trainer={"steps": 6})
    assert other.up()[0] == 0
    order = [row["task_id"] for row in after.groups(split="train")]
    undisturbed = [row["task_id"] for row in other.store().groups(split="train")]
    assert order == undisturbed


def test_killed_and_gone_on_with(tmp_path):
    trainer = {"steps": 4, "checkpoint_every": 2, "lr": 0.1, "lr_schedule": "linear", "warmup_steps": 1}
    # sync: in async, steps 2 and 3 may be made by one update
    run = MiniRun(tmp_path, trainer=trainer, algorithm={"mode": "sync"}, script={"latency_s": 0.02}, held_step=4)
    run.start()
    run.until(lambda store: 3 in live_steps(store))
    run.kill()
    run.go()
    assert run.gone(), run.leftovers()
    code, output = run.up()
    assert code == 0, output
    assert "going on from step-2" in output
    store = run.store()
    assert live_steps(store) == [1, 2, 3, 4]
    assert [row["step"] for row in store.steps() if row["state"] == "rolled_back"] == [3]
    assert [row["metrics"]["lr"] for row in store.steps() if row["state"] != "rolled_back"] == pytest.approx(
        [0.05, 0.1, 0.1 * 2 / 3, 0.1 / 3]
    )
    numbers = [row["version"] for row in store.policy_versions()]
    assert len(set(numbers)) == len(numbers)
    assert [row["state"] for row in store.policy_versions() if row["step"] == 3] == ["rolled_back", "live"]
    untangled(store)
    assert run.gone()


def test_no_checkpoint_is_passed_by_when_an_update_makes_several_steps(tmp_path):
    trainer = {"steps": 8, "checkpoint_every": 2, "keep_last": 9}
    run = MiniRun(tmp_path, trainer=trainer, evaluation={"every": 2}, script={"train_s": 0.6})
    assert run.up()[0] == 0
    store = run.store()
    assert {row["step"] // 2 for row in store.checkpoints()} == {1, 2, 3, 4}
    assert {row["step"] // 2 for row in store.evaluations()} == {0, 1, 2, 3, 4}


def test_killed_before_the_first_checkpoint(tmp_path):
    run = MiniRun(tmp_path, trainer={"steps": 2, "checkpoint_every": 9}, held_step=1)
    run.start()
    run.until(lambda store: store.counts_by_state("train")["running"])
    run.kill()
    run.go()
    code, output = run.up()
    assert code == 0, output
    assert live_steps(run.store()) == [1, 2]
    untangled(run.store())
    assert sum(row["state"] == "done" for row in run.store().evaluations()) == 2, "not evaluated twice before"


def test_second_interrupt_stops_at_once(tmp_path):
    run = MiniRun(tmp_path, held_step=1)  # and nobody calls `go`
    run.start()
    run.until(lambda store: store.phases()[-1]["phase"] == "training" if store.phases() else False)
    run.signal(INTERRUPT)
    while "stopping: waiting for" not in (line := run.process.stdout.readline()):
        assert line, "it ended"
    began = time.monotonic()
    run.signal(INTERRUPT)
    code, output = run.wait()
    assert code == 130, output
    assert time.monotonic() - began < 60
    assert run.gone()


def test_fresh_keeps_the_old_run_under_another_name(tmp_path):
    run = MiniRun(tmp_path, trainer={"steps": 1})
    assert run.up()[0] == 0
    code, output = run.up("--fresh")
    assert code == 0
    (old,) = [path for path in run.run_dir.path.parent.iterdir() if path != run.run_dir.path]
    assert str(old) in output
    assert live_steps(Store.open(old / "aglite.db", readonly=True)) == [1]


def test_another_recipe_is_another_run(tmp_path):
    run = MiniRun(tmp_path, trainer={"steps": 1})
    assert run.up()[0] == 0
    code, output = run.up("--set", "trainer.lr=0.5", "--set", "trainer.steps=2")
    assert code == 1
    assert "trainer.lr was 1e-05 and is now 0.5" in output and "--fresh" in output
    assert "trainer.steps" not in output


def test_second_up_on_the_same_directory(tmp_path):
    run = MiniRun(tmp_path, trainer={"steps": 500})
    run.start()
    run.until(lambda store: store.counts_by_state()["running"])
    first = run.process
    code, output = run.up()
    assert code == 1 and f"in use by another aglite (pid {first.pid})" in output
    run.process = first
    stopped = run.aglite("down", "--dir", str(run.run_dir.path))
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert run.wait()[0] == 0
    assert run.gone()


def test_port_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = MiniRun(tmp_path).up("--set", f"gateway.port={port}")
    assert code == 1 and f"port {port} on 127.0.0.1 is taken" in output and "gateway.port" in output


def test_missing_model(tmp_path):
    code, output = MiniRun(tmp_path).up("--set", f"model={tmp_path}/nowhere")
    assert code != 0 and "nowhere" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("grade", "timeout_s", "expected"),
    [
        ("def grade(task, rollout, workdir):\n    raise KeyError('oops')\n", 60, "oops"),
        ("def grade(task, rollout, workdir):\n    return float('nan')\n", 60, "nan"),
        ("import time\ndef grade(task, rollout, workdir):\n    time.sleep(600)\n", 1, "within 1 s"),
    ],
    ids=["raises", "nan", "hangs"],
)
def test_a_grader_that_never_works_ends_the_run_with_its_cause(tmp_path, grade, timeout_s, expected):
    reward = {"timeout_s": timeout_s}
    run = MiniRun(tmp_path, grade=grade, reward=reward, agent={"attempts": 1}, evaluation={"before": False})
    code, output = run.up()
    assert code == 1, output
    assert "grader" in output and expected in output.lower() and "Traceback" not in output.split("aglite:")[-1]
    assert run.gone()
    store = run.store()
    assert store.counts_by_state()["error"] >= 8 and not store.steps()


@pytest.mark.parametrize(
    ("phase", "steps", "begun"), [("rollout", [1], 4), ("training", [1], 8), ("evaluating", [1, 2], 8)]
)
def test_a_worker_that_dies_is_replaced(tmp_path, phase, steps, begun):
    """Killed while agents run, in the middle of an update, while the policy is evaluated: the run goes back to its last
    checkpoint, of step 1, by itself, and what it trains fits together."""
    run = MiniRun(
        tmp_path,
        program=held(tmp_path / "go", after=begun),
        held_step=2 if phase == "training" else None,
        algorithm={"mode": "sync"},
        trainer={"steps": 3},
        evaluation={"before": False, "every": 2 if phase == "evaluating" else 0},
        script={"latency_s": 0.1, "train_s": 1.0},
    )
    run.start()
    run.until(lambda store: live_steps(store) == steps and store.checkpoints() and store.phases(1)[0]["phase"] == phase)
    os.kill(worker_of(run), 9)
    run.go()
    code, output = run.wait()
    assert code == 0, output
    assert "killed by SIGKILL" in output and "try 1 of 2" in output and "going on from step-1" in output
    assert "Traceback" not in output and run.gone()
    store = run.store()
    assert live_steps(store) == [1, 2, 3] and store.counts_by_state()["error"] == 0
    untangled(store)


def test_a_worker_that_dies_again_and_again_ends_the_run(tmp_path):
    run = MiniRun(tmp_path, trainer={"steps": 3, "checkpoint_every": 3}, script={"latency_s": 0.02}, held_step=1)
    run.start()
    killed = {None}

    def serves_anew(store):
        phases = store.phases(1)
        return phases and phases[0]["phase"] in ("rollout", "evaluating", "training") and worker_of(run) not in killed

    for _ in range(3):
        run.until(serves_anew)
        killed.add(worker := worker_of(run))
        os.kill(worker, 9)
    code, output = run.wait()
    assert code == 1 and "SIGKILL" in output and "model worker" in output and "try 2 of 2" in output
    assert run.gone()
    run.go()
    assert run.up()[0] == 0
    untangled(run.store())


def test_an_error_at_the_start_is_said_once(tmp_path):
    run = MiniRun(tmp_path)
    run.worker = {"AGLITE_WORKER": "no_such_module"}
    code, output = run.up()
    assert code == 1 and output.count("the model worker ended with exit code 1") == 1, output
    assert output.count("No module named no_such_module") == 1
    (event,) = [event for event in run.store().events() if event["level"] == "error"]
    assert "no_such_module" in event["text"] and run.store().phases(1)[0]["cause"]


def test_a_worker_that_hangs_is_said_so(tmp_path):
    program = held(tmp_path / "go")
    run = MiniRun(tmp_path, program=program, trainer={"steps": 1}, evaluation={"before": False})
    run.start()
    run.until(lambda store: store.counts_by_state()["running"])
    os.kill(worker_of(run), signal.SIGSTOP)
    client, words = run.client, "no sign of life for"
    run.until(lambda store: words in client.status()["message"])
    os.kill(worker_of(run), signal.SIGCONT)
    run.until(lambda store: words not in client.status()["message"])
    run.go()
    assert run.wait()[0] == 0


def worker_of(run: MiniRun) -> int | None:
    return next((int(path) for path in os.listdir("/proc") if path.isdigit() and is_worker(path, run)), None)


def is_worker(pid: str, run: MiniRun) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return b"aglite.engine.scripted" in command and str(run.run_dir.path).encode() in environ


def test_pause_holds_and_resume_goes_on(tmp_path):
    run = MiniRun(tmp_path, trainer={"steps": 500}, script={"latency_s": 0.02})
    run.start()
    run.until(lambda store: live_steps(store))
    where = ("--dir", str(run.run_dir.path))
    assert run.aglite("pause", *where).returncode == 0
    run.until(lambda store: store.phases()[-1]["phase"] == "paused")
    calls = run.calls_at_rest()
    assert run.calls_at_rest() == calls and run.store().phases()[-1]["phase"] == "paused"
    steps = len(live_steps(run.store()))
    assert run.aglite("resume", *where).returncode == 0
    run.until(lambda store: len(live_steps(store)) > steps)
    run.signal(INTERRUPT)
    assert run.wait()[0] == 130
    assert run.gone()
