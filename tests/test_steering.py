"""What a person can change while a run goes on, through the control API of a real one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mini_run import AGENT, MiniRun

from aglite.client import ControlError
from aglite.config import Tasks
from aglite.errors import AgliteError
from aglite.training.order import TaskOrder
from aglite.training.state import LoopState

WAITING = "import os, pathlib, time\nwhile not pathlib.Path({go!r}).exists(): time.sleep(0.05)\n" + AGENT


def waiting(tmp_path, **more):
    """A run whose agents wait for the file `go`, so that nothing changes until the test wants it."""
    program = WAITING.replace("{go!r}", repr(str(tmp_path / "go")))
    more = {"evaluation": {"before": False}, "trainer": {"steps": 1}, **more}
    run = MiniRun(tmp_path, program=program, **more)
    run.start()
    return run, run.client


def running(run, number):
    return run.until(lambda store: len(rows := store.rollouts(state="running")) == number and rows)


def test_concurrency_grows_at_once_and_shrinks_with_the_rollouts_that_end(tmp_path):
    run, client = waiting(tmp_path, agent={"concurrency": 1})
    running(run, 1)
    assert client.status()["concurrency"] == 1
    assert client.post("concurrency", {"rollouts": 4}) == {"concurrency": 4}
    running(run, 4)
    client.post("concurrency", {"rollouts": 1})
    assert client.status()["concurrency"] == 1
    assert len(run.store().rollouts(state="running")) == 4  # nobody is ended for it
    with pytest.raises(ControlError, match="greater than or equal to 1"):
        client.post("concurrency", {"rollouts": 0})
    (tmp_path / "go").touch()
    code, output = run.wait()
    assert code == 0, output
    assert "4 rollouts at once from now on" in output


def test_a_quarantined_rollout_is_not_trained(tmp_path):
    """One that runs is ended, one that is done loses its place in the baseline; the rest of the group trains."""
    run, client = waiting(tmp_path, algorithm={"group_size": 3, "groups_per_step": 1, "groups_in_flight": 1})
    rows = running(run, 3)
    chosen = rows[0]["id"]
    client.post(f"rollouts/{chosen}/quarantine")
    run.until(lambda store: store.rollout(chosen)["state"] == "cancelled")
    assert run.store().rollout(chosen)["cause"] == "quarantined"
    with pytest.raises(ControlError, match="no rollout"):
        client.post("rollouts/r-none/quarantine")
    (tmp_path / "go").touch()
    code, output = run.wait()
    assert code == 0, output
    store = run.store()
    assert store.steps()[0]["metrics"]["rollouts"] == 2
    assert store.rollout(chosen)["trained_tokens"] == 0


def test_a_rollout_that_is_done_leaves_the_baseline(tmp_path):
    holding = WAITING.replace("{go!r}", repr(str(tmp_path / "go"))).replace(
        "while not", "while os.environ['AGLITE_ROLLOUT_ID'] != open(os.environ['FIRST']).read() and not"
    )
    (tmp_path / "first").write_text("")
    run = MiniRun(
        tmp_path,
        program=holding,
        agent={"env": {"FIRST": str(tmp_path / "first")}},
        algorithm={"group_size": 3, "groups_per_step": 1, "groups_in_flight": 1},
        evaluation={"before": False},
        trainer={"steps": 1},
    )
    run.start()
    client = run.client
    chosen = running(run, 3)[0]["id"]
    (tmp_path / "first").write_text(chosen)
    run.until(lambda store: store.rollout(chosen)["state"] == "done")
    client.post(f"rollouts/{chosen}/quarantine")
    row = run.store().rollout(chosen)
    assert (row["state"], row["cause"], row["reward"]) == ("cancelled", "quarantined", None)
    (tmp_path / "go").touch()
    code, output = run.wait()
    assert code == 0, output
    assert run.store().steps()[0]["metrics"]["rollouts"] == 2
    assert f"{chosen} is quarantined: it was done, with reward" in output


def test_a_quarantined_task_is_left_out_also_by_the_next_start(tmp_path):
    run, client = waiting(tmp_path, trainer={"steps": 4})
    task = running(run, 6)[0]["task_id"]
    members = [row["id"] for row in run.store().rollouts() if row["task_id"] == task]
    assert client.post(f"tasks/{task}/quarantine") == {"rollouts": len(members)}
    run.until(lambda store: all(store.rollout(id)["state"] == "cancelled" for id in members))
    assert client.status()["quarantined"] == [task]
    with pytest.raises(ControlError, match="no training task"):
        client.post("tasks/none/quarantine")
    client.post("stop", {"now": True})
    run.wait()
    (tmp_path / "go").touch()
    code, output = run.up()
    assert code == 0, output
    later = [row for row in run.store().rollouts() if row["task_id"] == task and row["id"] not in members]
    assert later == [] and len(run.store().steps()) == 4


def test_the_order_of_tasks_passes_the_quarantined_by_and_changes_nothing_else():
    rows = [{"id": str(number)} for number in range(4)]
    settings = Tasks(train="a.jsonl", val="b.jsonl")
    plain, left_out = TaskOrder(rows, 3, settings), TaskOrder(rows, 3, settings)
    left_out.quarantine("2")

    def first(order, number):
        state = LoopState()
        return [order.next(state)["id"] for _ in range(number)]

    assert first(left_out, 6) == [id for id in first(plain, 8) if id != "2"]
    for id in "01":
        left_out.quarantine(id)
    assert first(left_out, 3) == ["3"] * 3
    with pytest.raises(AgliteError, match="last task"):
        left_out.quarantine("3")
    left_out.release("2")
    with pytest.raises(AgliteError, match="not quarantined"):
        left_out.release("2")


def test_stopping_after_the_step_trains_it_and_writes_a_checkpoint(tmp_path):
    run, client = waiting(tmp_path, trainer={"steps": 3, "checkpoint_every": 3})
    running(run, 6)
    assert client.post("stop", {"after_step": True}) == {"state": "stopping after step 1"}
    assert client.status()["message"] == "stops after step 1"
    (tmp_path / "go").touch()
    code, output = run.wait()
    assert code == 0, output
    assert [row["step"] for row in run.store().steps()] == [1]
    assert "stopped after step 1; checkpoint" in output
    assert run.gone()
    code, output = run.up()
    assert code == 0, output
    assert [row["step"] for row in run.store().steps()] == [1, 2, 3]


SLOW = """
import os, pathlib, time
first, go = (pathlib.Path(os.environ["PLACE"], name) for name in ("first", "go"))
while not first.exists(): time.sleep(0.05)
mine = first.read_text() in open(os.environ["AGLITE_TASK_FILE"]).read()
while mine and not go.exists(): time.sleep(0.05)
""" + AGENT.replace('"max_tokens": 16', '"max_tokens": 4 if mine else 1500')


def test_a_drain_ends_when_somebody_cannot_wait(tmp_path):
    """One group is complete, the other has replies under way that take minutes."""
    run = MiniRun(
        tmp_path,
        program=SLOW,
        script={"length": 1500, "latency_s": 0.2},
        gateway={"close": "drain", "drain_timeout_s": 600},
        agent={"env": {"PLACE": str(tmp_path)}, "limits": {"wall_s": 600}},
        algorithm={"groups_per_step": 1, "groups_in_flight": 2},
        evaluation={"before": False},
        trainer={"steps": 2},
    )
    run.start()
    client = run.client
    row = running(run, 4)[-1]
    with pytest.raises(ControlError, match="nothing is being drained"):
        client.post("preempt")
    (tmp_path / "chosen").write_text(run.store().task("train", row["task_id"])["public"]["question"])
    (tmp_path / "chosen").rename(tmp_path / "first")
    run.until(lambda store: client.status()["engine"]["running"] >= 2)
    (tmp_path / "go").touch()
    run.until(lambda store: store.phases()[-1]["phase"] == "draining")
    client.post("preempt")
    run.until(lambda store: store.steps())
    (drain,) = [row for row in run.store().phases() if row["phase"] == "draining"]
    assert drain["finished_at"] - drain["started_at"] < 150
    client.post("stop", {"now": True})
    run.wait()


def test_what_is_there_to_read(tmp_path):
    run, client = waiting(tmp_path, algorithm={"groups_per_step": 1, "groups_in_flight": 1})
    row = running(run, 2)[0]

    def sandbox():
        return next(each for each in client.sandboxes() if each["rollout_id"] == row["id"])

    run.until(lambda _: sandbox()["memory"] > 1_000_000)  # it has only just been started
    place = sandbox()
    assert place["state"] == "running" and not place["leaked"] and place["processes"] >= 1
    recipe = {each["key"]: each for each in client.recipe()}
    assert recipe["trainer.steps"] | {"meaning": ""} == {
        "key": "trainer.steps", "value": 1, "default": 10, "differs": True, "meaning": "",
    }  # fmt: skip
    assert not recipe["trainer.lr"]["differs"] and "AdamW" in recipe["trainer.lr"]["meaning"]
    assert recipe["agent.limits.wall_s"]["value"] == run.recipe["agent"]["limits"]["wall_s"]
    phases = client.status()["phases"]
    assert phases[0]["phase"] == "starting" and phases[-1]["finished_at"] is None
    (tmp_path / "go").touch()
    code, output = run.wait()
    assert code == 0, output
    from aglite.stored import StoredRun

    stored = StoredRun(run.run_dir)
    (sample,) = stored.tokens(row["id"])
    detail = stored.rollout(row["id"], tokens=True)
    assert sum(sample["mask"]) == detail["sampled_tokens"]
    assert sample["ids"] == detail["call_rows"][-1]["prompt_ids"] + detail["call_rows"][-1]["response_ids"]
    assert len(sample["texts"]) == len(sample["ids"]) == len(sample["logprobs"])
    assert stored.recipe() == list(recipe.values())


def test_what_outlived_its_rollout_is_shown_and_ended(tmp_path):
    run, client = waiting(tmp_path, agent={"concurrency": 2})
    row = running(run, 2)[0]
    environ = Path(f"/proc/{client.sandboxes()[0]['pid']}/environ").read_bytes()
    mark = next(entry for entry in environ.split(b"\0") if entry.startswith(b"AGLITE_SUPERVISOR=")).decode()
    name, _, value = mark.partition("=")
    stray = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(300)"],
        env={name: value, "AGLITE_ROLLOUT_ID": "r-gone"},
        start_new_session=True,
    )
    try:
        left = [each for each in client.sandboxes() if each["leaked"]]
        assert [(each["rollout_id"], each["pid"]) for each in left] == [("r-gone", stray.pid)]
        assert row["id"] not in [each["rollout_id"] for each in left]
        client.post("rollouts/r-gone/kill")
        assert stray.wait(60) != 0
        assert not any(each["leaked"] for each in client.sandboxes())
    finally:
        stray.kill()
        client.post("stop", {"now": True})
        run.wait()
