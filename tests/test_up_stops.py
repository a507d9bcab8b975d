"""`aglite up` is stopped, paused or left alone at awkward moments."""

import os
import signal
import time
from pathlib import Path

from mini_run import INTERRUPT, MiniRun, held
from test_up import live_steps, untangled

from aglite.train import tidy_checkpoints

SLOW_TASKS = """
import os, pathlib, time
def train():
    pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
    time.sleep(600)
    yield {"id": "t", "public": {}}
"""


def phase_is(name):
    return lambda store: (store.phases(1) or [{"phase": ""}])[-1]["phase"] == name


def done_evaluations(store):
    return [row["step"] for row in store.evaluations() if row["state"] == "done"]


def test_a_stop_does_not_wait_for_slow_tasks(tmp_path):
    run = MiniRun(tmp_path, tasks={"train": "tasks.py:train"})
    (tmp_path / "recipe" / "tasks.py").write_text(SLOW_TASKS)
    run.start()
    note = tmp_path / "recipe" / "pid"
    while not (note.exists() and note.read_text()):
        assert run.process.poll() is None
        time.sleep(0.05)
    began = time.monotonic()
    run.signal(INTERRUPT)
    code, output = run.wait()
    assert code == 130, output
    assert time.monotonic() - began < 60
    assert not Path(f"/proc/{note.read_text()}").exists()
    assert not run.run_dir.control.exists()


def test_an_evaluation_that_a_stop_broke_off_is_made_up_for(tmp_path):
    program = held(tmp_path / "go", after=4)  # those that are trained
    run = MiniRun(tmp_path, program=program, trainer={"steps": 1}, evaluation={"before": False})
    run.start()
    run.until(phase_is("evaluating"))
    run.signal(INTERRUPT)
    code, output = run.wait()
    assert code == 130, output
    assert live_steps(run.store()) == [1] and done_evaluations(run.store()) == []
    run.go()
    code, output = run.up()
    assert code == 0, output
    assert live_steps(run.store()) == [1] and done_evaluations(run.store()) == [1]
    untangled(run.store())
    assert "all 1 steps are done" in run.up()[1]


def asking(tmp_path, **recipe):
    """A run whose agents go on asking until they are let go, so that its evaluation lasts until then."""
    limits = {"wall_s": 250, "calls": 100_000, "sampled_tokens": 1_000_000}
    program = held(tmp_path / "go", asking=True)
    run = MiniRun(tmp_path, program=program, agent={"limits": limits}, script={"latency_s": 0.1}, **recipe)
    run.start()
    return run


def test_a_pause_holds_an_evaluation_too(tmp_path):
    run = asking(tmp_path, trainer={"steps": 1})
    run.until(lambda store: phase_is("evaluating")(store) and sum(row["calls"] for row in store.rollouts()))
    where = ("--dir", str(run.run_dir.path))
    assert run.aglite("pause", *where).returncode == 0
    run.until(phase_is("paused"))
    calls = run.calls_at_rest()
    assert run.calls_at_rest() == calls and phase_is("paused")(run.store())
    run.go()
    assert run.aglite("resume", *where).returncode == 0
    code, output = run.wait()
    assert code == 0, output
    assert done_evaluations(run.store()) == [0, 1]
    assert run.store().counts_by_state()["failed"] == 0


def test_down_now_breaks_off_a_paused_evaluation(tmp_path):
    run = asking(tmp_path)
    run.until(phase_is("evaluating"))
    where = ("--dir", str(run.run_dir.path))
    assert run.aglite("pause", *where).returncode == 0
    run.until(phase_is("paused"))
    stopped = run.aglite("down", "--now", *where)
    assert stopped.returncode == 0, stopped.stderr
    code, output = run.wait()
    assert code == 130 and "Traceback" not in output, output
    assert [row["state"] for row in run.store().evaluations()] == ["abandoned"]
    assert run.gone() and phase_is("stopped")(run.store())


def test_nobody_reads_what_it_says(tmp_path):
    program = held(tmp_path / "go")
    run = MiniRun(tmp_path, program=program, trainer={"steps": 2}, evaluation={"before": False})
    run.start()
    run.until(phase_is("rollout"))
    run.process.stdout.close()
    run.go()
    assert run.process.wait(240) == 0
    assert live_steps(run.store()) == [1, 2]
    assert not run.run_dir.control.exists() and run.gone()


def test_a_closed_terminal_is_a_clean_stop(tmp_path):
    run = MiniRun(tmp_path, trainer={"steps": 400}, evaluation={"before": False})
    run.start()
    run.until(lambda store: live_steps(store))
    run.signal(signal.SIGHUP)
    run.signal(signal.SIGHUP)  # the kernel's and the shell's
    code, output = run.wait()
    assert code == 130 and "stopped after step" in output, output
    last = live_steps(run.store())[-1]
    assert run.store().checkpoints()[-1]["step"] == last


def test_nohup_is_respected(tmp_path):
    program = held(tmp_path / "go")
    run = MiniRun(tmp_path, program=program, trainer={"steps": 1}, evaluation={"before": False})
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what a child inherits
    try:
        run.start()
    finally:
        signal.signal(signal.SIGHUP, before)
    run.until(phase_is("rollout"))
    os.kill(run.process.pid, signal.SIGHUP)
    run.go()
    assert run.wait()[0] == 0


def test_what_a_death_while_saving_left_is_cleared_away(tmp_path):
    for name in ("step-1", "step-2.tmp", "step-3", "step-3.old", "step-4.old", "step-5.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "aglite.json").write_text(name)
    tidy_checkpoints(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3", "step-4"]
    assert (tmp_path / "step-4" / "aglite.json").read_text() == "step-4.old"
    assert (tmp_path / "step-3" / "aglite.json").read_text() == "step-3"
