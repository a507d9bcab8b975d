"""A whole run while the machine fails to launch for a time: groups are made good, not burnt."""

from mini_run import MiniRun


def test_a_member_lost_to_infrastructure_is_made_good(tmp_path):
    """The grader cannot reach what it needs for one rollout of the first group."""
    marks = tmp_path / "marks"
    grade = f"""
import pathlib
def grade(task, rollout, workdir):
    mark = pathlib.Path({str(marks)!r})
    try:
        with mark.open("x") as file: file.write(rollout["id"])
    except FileExistsError: pass
    if mark.read_text() == rollout["id"]:
        raise OSError("no judge")
    return len(rollout["id"] + rollout["messages"][-1]["content"]) % 7 / 7
"""
    # sync: every group that was begun is trained
    sync = {"mode": "sync", "groups_in_flight": None}
    run = MiniRun(tmp_path, grade=grade, evaluation={"before": False}, trainer={"steps": 2}, algorithm=sync)
    code, output = run.up()
    assert code == 0, output
    store = run.store()
    (lost,) = store.rollouts(state="error")
    assert lost["id"] == marks.read_text() and lost["cause"].startswith("grader: OSError: no judge")
    members = store.group_rollouts(lost["group"])
    assert [member["state"] for member in members].count("done") == 2 and len(members) == 3
    (group,) = [group for group in store.groups() if group["id"] == lost["group"]]
    assert (group["state"], group["refills"]) == ("trained", 1)
    step = next(row for row in store.steps() if row["step"] == group["step"])
    assert step["metrics"]["causes"] == {"grader": 1} and step["metrics"]["rollouts_lost"] == 1


def test_a_machine_that_cannot_launch_for_a_while_burns_no_groups(tmp_path):
    run = MiniRun(tmp_path, evaluation={"before": False}, trainer={"steps": 500}, script={"latency_s": 0.02})
    run.start()
    run.until(lambda store: store.steps())
    scratch = run.run_dir.scratch
    scratch.rename(scratch.with_name("aside"))
    scratch.write_text("in the way")
    status = run.until(lambda store: any("launching is paused" in event["text"] for event in store.events()))
    assert status and "launching is paused" in run.aglite("status", "--dir", str(run.run_dir.path)).stdout
    scratch.unlink()
    scratch.mkdir()
    steps = len(run.store().steps())
    run.until(lambda store: len(store.steps()) >= steps + 2)
    run.client.post("stop", {"after_step": True})
    code, output = run.wait()
    assert code == 0, output
    assert "warning: launching is paused" in output and "launching goes on" in output
    store = run.store()
    assert store.counts_by_cause().get("launch", 0) <= 1
    assert store.counts_by_state()["done"] >= 12
    # a grading that was under way when its files went may have cost one its second member
    assert sum(group["state"] == "dropped" for group in store.groups()) <= 1
