"""`aglite up` on a disk that fills, and in a directory that goes away."""

import shutil
import subprocess

import pytest
from mini_run import MiniRun
from test_up import live_steps, untangled
from test_up_stops import phase_is

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
    with (disk / "ballast").open("ab") as file:
        file.write(b"x" * 1024 * (free - leave))


def test_below_the_floor_it_pauses_and_goes_on_by_itself(tmp_path, small_disk):
    run = MiniRun(tmp_path, trainer={"steps": 3, "min_free_disk_mb": 4}, script={"latency_s": 0.05})
    run.run_dir = RunDir(small_disk / "run")
    run.start()
    run.until(lambda store: live_steps(store))
    fill(small_disk, leave=2000)
    run.until(phase_is("paused"))
    assert "MB of disk left, 4 wanted" in run.store().phases(1)[0]["cause"]
    steps = live_steps(run.store())
    assert run.aglite("resume", "--dir", str(run.run_dir.path)).returncode == 0  # asks for what it cannot have
    assert phase_is("paused")(run.store()) and live_steps(run.store()) == steps
    (small_disk / "ballast").unlink()
    code, output = run.wait()
    assert code == 0 and "paused: 1 MB of disk left" in output, output
    assert live_steps(run.store()) == [1, 2, 3]
    assert run.store().counts_by_state()["failed"] == 0
    untangled(run.store())


def test_a_checkpoint_waits_for_room(tmp_path, small_disk):
    run = MiniRun(tmp_path, trainer={"steps": 2}, evaluation={"before": False})
    (tmp_path / "model" / "more.bin").write_bytes(b"x" * 5_000_000)
    run.run_dir = RunDir(small_disk / "run")
    run.start()
    run.until(lambda store: store.checkpoints())
    fill(small_disk, leave=3000)
    run.until(phase_is("paused"))
    assert "MB of disk left" in run.store().phases(1)[0]["cause"]
    (small_disk / "ballast").unlink()
    code, output = run.wait()
    assert code == 0, output
    assert live_steps(run.store()) == [1, 2]
    assert (run.run_dir.checkpoints / "step-2" / "more.bin").is_file()


def test_a_full_disk_ends_the_run_with_one_message_and_the_next_start_goes_on(tmp_path, small_disk):
    run = MiniRun(tmp_path, trainer={"steps": 200}, script={"latency_s": 0.02})
    run.run_dir = RunDir(small_disk / "run")
    run.start()
    run.until(lambda store: live_steps(store))
    fill(small_disk, leave=100)
    code, output = run.wait()
    # the store met it, or the (scripted) worker that was writing a checkpoint
    assert code == 1 and ("the disk is full" in output or "No space left" in output), output
    assert "Traceback" not in output
    assert not run.run_dir.control.exists() and run.gone()
    assert run.aglite("status", "--dir", str(run.run_dir.path)).returncode == 0
    (small_disk / "ballast").unlink()
    last = live_steps(run.store())[-1]
    code, output = run.up("--steps", str(last + 1))
    assert code == 0, output
    assert live_steps(run.store()) == list(range(1, last + 2)) and not run.store().check()
    untangled(run.store())


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
