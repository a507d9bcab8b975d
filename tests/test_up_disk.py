"""`aglite up` on a disk that fills, and in a directory that goes away."""

import contextlib
import re
import shutil
import subprocess
import threading
import time

import pytest
from mini_run import INTERRUPT, MiniRun, held
from test_up import live_steps, untangled
from test_up_stops import phase_is

from aglite.client import ControlError
from aglite.paths import RunDir


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", mounted], capture_output=True).returncode:
        pytest.skip("cannot mount a small tmpfs here")
    yield mounted
    subprocess.run(["umount", "-l", mounted], check=True)


def fill(disk, *, leave: int) -> None:
    """A file that leaves `leave` KiB free."""
    free = shutil.disk_usage(disk).free // 1024
    with (disk / "ballast").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        file.write(b"x" * 1024 * (free - leave))


def test_below_the_floor_it_pauses_and_goes_on_by_itself(tmp_path, small_disk):
    trainer = {"steps": 3, "min_free_disk_mb": 4}
    run = MiniRun(tmp_path, trainer=trainer, script={"latency_s": 0.05}, held_step=2)
    run.run_dir = RunDir(small_disk / "run")
    run.start()
    run.until(lambda store: live_steps(store))
    fill(small_disk, leave=2000)
    run.go()
    run.until(phase_is("paused"))
    assert "MB of disk left, 4 wanted" in run.store().phases(1)[0]["cause"]
    steps = live_steps(run.store())
    assert run.aglite("resume", "--dir", str(run.run_dir.path)).returncode == 0  # asks for what it cannot have
    assert phase_is("paused")(run.store()) and live_steps(run.store()) == steps
    (small_disk / "ballast").unlink()
    code, output = run.wait()
    assert code == 0 and re.search("paused: [01] MB of disk left", output), output
    assert live_steps(run.store()) == [1, 2, 3]
    assert run.store().counts_by_state()["failed"] == 0
    untangled(run.store())


def test_a_checkpoint_waits_for_room(tmp_path, small_disk):
    run = MiniRun(tmp_path, trainer={"steps": 2}, evaluation={"before": False}, held_step=2)
    (tmp_path / "model" / "more.bin").write_bytes(b"x" * 5_000_000)
    run.run_dir = RunDir(small_disk / "run")
    run.start()
    run.until(lambda store: store.checkpoints())
    fill(small_disk, leave=3000)
    run.go()
    run.until(phase_is("paused"))
    assert "MB of disk left" in run.store().phases(1)[0]["cause"]
    (small_disk / "ballast").unlink()
    code, output = run.wait()
    assert code == 0, output
    assert live_steps(run.store()) == [1, 2]
    assert (run.run_dir.checkpoints / "step-2" / "more.bin").is_file()


def test_a_disk_that_is_full_at_once_holds_the_run(tmp_path, small_disk):
    """No room from one moment to the next: nothing is lost, no rollout fails, and it goes on when there is room."""
    run = MiniRun(
        tmp_path,
        trainer={"steps": 4, "checkpoint_every": 4},
        agent={"limits": {"wall_s": 15}},
        script={"latency_s": 0.02},
        evaluation={"before": False},
        held_step=2,
    )
    run.run_dir = RunDir(small_disk / "run")
    run.start()
    client = run.client

    def all_are_held(store):
        """What an agent or its grading writes to the full disk itself is lost, so none is about to."""
        counts = store.counts_by_state()
        busy = counts["starting"] or counts["grading"]
        return counts if live_steps(store) and phase_is("training")(store) and not busy else None

    counts = None
    while counts != (counts := run.until(all_are_held)):  # nor has one of them its last reply
        time.sleep(3)
    fill(small_disk, leave=0)
    run.go()
    run.until(lambda store: client.status()["message"].startswith("paused: the disk of"))
    assert client.status()["gate"]["state"] == "closed"
    time.sleep(17)  # longer than an agent may take
    assert client.status()["message"].startswith("paused: the disk of") and run.process.poll() is None
    (small_disk / "ballast").unlink()
    code, output = run.wait()
    assert code == 0 and "paused: the disk of" in output and "the disk was full for" in output, output
    assert "Traceback" not in output
    store = run.store()
    counts = store.counts_by_state()
    assert live_steps(store) == [1, 2, 3, 4]
    assert counts["failed"] == counts["error"] == 0, [row["cause"] for row in store.rollouts() if row["cause"]]
    assert not store.check()
    untangled(store)


def test_the_first_checkpoint_waits_for_room_too(tmp_path, small_disk):
    """Nobody knows yet how large it is: it is tried, and again when there is more room than there was."""
    run = MiniRun(tmp_path, program=held(tmp_path / "go"), trainer={"steps": 1}, evaluation={"before": False})
    (tmp_path / "model" / "more.bin").write_bytes(b"x" * 5_000_000)
    run.run_dir = RunDir(small_disk / "run")
    run.start()
    run.until(phase_is("rollout"))
    fill(small_disk, leave=4000)
    run.go()
    run.until(phase_is("paused"))
    assert "MB of disk left" in run.store().phases(1)[0]["cause"] and not run.store().checkpoints()
    (small_disk / "ballast").unlink()
    code, output = run.wait()
    assert code == 0 and "Traceback" not in output, output
    assert (run.run_dir.checkpoints / "step-1" / "more.bin").is_file()


def test_a_run_on_a_full_disk_can_be_ended_and_gone_on_with(tmp_path, small_disk):
    run = MiniRun(tmp_path, trainer={"steps": 200, "checkpoint_every": 200}, script={"latency_s": 0.02})
    run.run_dir = RunDir(small_disk / "run")
    run.start()
    run.until(lambda store: live_steps(store))
    fill(small_disk, leave=0)
    client = run.client
    run.until(lambda store: client.status()["message"].startswith("paused: the disk of"))
    run.signal(INTERRUPT)
    code, output = run.wait()
    assert code == 1 and "the disk is full" in output and "Traceback" not in output, output
    assert not run.run_dir.control.exists() and run.gone()
    assert run.aglite("status", "--dir", str(run.run_dir.path)).returncode == 0
    (small_disk / "ballast").unlink()
    code, output = run.up("--steps", "2")
    assert code == 0, output
    assert live_steps(run.store()) == [1, 2] and not run.store().check()
    untangled(run.store())


def test_serving_from_a_full_disk_can_be_ended(tmp_path, small_disk):
    run = MiniRun(tmp_path)
    run.run_dir = RunDir(small_disk / "served")
    command = run.command("serve", str(tmp_path / "model"), "--dir", str(run.run_dir.path))
    run.process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=run.environment, cwd=tmp_path
    )
    run.until(phase_is("rollout"))
    fill(small_disk, leave=0)
    client = run.client

    def open_one():
        with pytest.raises(ControlError):
            client.post("rollouts", {"task": {}})

    opening = threading.Thread(target=open_one)
    opening.start()
    deadline = time.monotonic() + 120
    while not client.status()["message"].startswith("paused: the disk of") and time.monotonic() < deadline:
        time.sleep(0.1)
    run.signal(INTERRUPT)
    code, output = run.wait()
    opening.join()
    assert code in (1, 130) and "paused: the disk of" in output and "Traceback" not in output, output


def test_its_directory_is_deleted(tmp_path):
    run = MiniRun(tmp_path, trainer={"steps": 300}, script={"latency_s": 0.02}, evaluation={"before": False})
    run.start()
    run.until(lambda store: live_steps(store))
    shutil.rmtree(run.run_dir.path, ignore_errors=True)
    code, output = run.wait()
    assert code == 1 and "Traceback" not in output and str(run.run_dir.path) in output, output
    assert run.gone()


def test_a_directory_that_cannot_be_written(tmp_path):
    run = MiniRun(tmp_path)
    (tmp_path / "file").write_text("")
    run.run_dir = RunDir(tmp_path / "file" / "run")
    code, output = run.up()
    assert code == 1 and "cannot be used" in output and "--dir" in output and "Traceback" not in output


def test_a_directory_that_became_read_only(tmp_path):
    run = MiniRun(tmp_path, trainer={"steps": 1}, evaluation={"before": False})
    assert run.up()[0] == 0
    path = str(run.run_dir.path)
    if subprocess.run(["mount", "--bind", path, path], capture_output=True).returncode:
        pytest.skip("cannot mount here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", path], check=True)
        for option in ("--resume", "--fresh"):
            code, output = run.up(option)
            assert code == 1 and "cannot be used" in output and "Traceback" not in output
        for command in ("status", "rollouts"):
            assert run.aglite(command, "--dir", path).returncode == 0
    finally:
        subprocess.run(["umount", "-l", path], check=True)
