"""Checkpoint folders when the disk or the process fails. No verl."""

import json
import os
import resource
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from aglite.errors import AgliteError, DiskFullError  # noqa: E402
from aglite.worker import checkpoint  # noqa: E402


def pieces(fill, size=50_000):
    weights = [("model.embed_tokens.weight", torch.full((size,), float(fill)))]
    optimizer = {"state": {0: {"exp_avg": torch.full((2 * size,), fill + 0.5)}}, "param_groups": [{"lr": 0.1}]}
    return weights, optimizer


def save(path, model, fill, size=50_000):
    weights, optimizer = pieces(fill, size)
    checkpoint.save(path, model, weights, optimizer, {"step": fill})


def assert_holds(path, fill):
    state = checkpoint.load(path)
    assert state.meta == {"step": fill}
    assert state.weights["model.embed_tokens.weight"].eq(fill).all()
    assert state.optimizer["state"][0]["exp_avg"].eq(fill + 0.5).all()


def test_a_folder_holds_what_was_saved_and_no_weights_of_the_old_model(tiny_model, tmp_path):
    save(tmp_path / "step-3", tiny_model, 3)
    assert_holds(tmp_path / "step-3", 3)
    names = {file.name for file in (tmp_path / "step-3").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors", "trainer", "aglite.json"} <= names
    assert json.loads((tmp_path / "step-3" / "config.json").read_text())["dtype"] == "float32"
    assert [file.name for file in tmp_path.iterdir()] == ["step-3"]


def test_a_second_save_replaces_the_folder(tiny_model, tmp_path):
    save(tmp_path / "step-3", tiny_model, 3)
    save(tmp_path / "step-3", tiny_model, 4)
    assert_holds(tmp_path / "step-3", 4)
    assert [file.name for file in tmp_path.iterdir()] == ["step-3"]


@pytest.mark.parametrize("limit", [1_000, 150_000, 300_000])
def test_a_write_that_fails_leaves_the_old_ones_alone(tiny_model, tmp_path, limit):
    """Any file may be the one that no longer fits: tokenizer, weights or optimizer."""
    save(tmp_path / "step-3", tiny_model, 3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(DiskFullError, match="nothing was written") as caught:
            save(tmp_path / "step-4", tiny_model, 4, size=60_000)
        assert "disk space" in caught.value.mend
        with pytest.raises(AgliteError):
            save(tmp_path / "step-3", tiny_model, 5, size=80_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_holds(tmp_path / "step-3", 3)
    assert [file.name for file in tmp_path.iterdir()] == ["step-3"]


def test_a_full_disk_is_seen_before_anything_is_written(tiny_model, tmp_path):
    mounted = tmp_path / "small"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mounted], capture_output=True).returncode:
        pytest.skip("cannot mount a small tmpfs here")
    try:
        save(mounted / "step-3", tiny_model, 3)
        with pytest.raises(AgliteError, match=r"needs 1 MB.*has 1 MB left|needs 1 MB.*has 0 MB left"):
            save(mounted / "step-4", tiny_model, 4, size=100_000)
        assert_holds(mounted / "step-3", 3)
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_a_process_killed_while_it_writes_leaves_no_half_checkpoint(tiny_model, tmp_path):
    save(tmp_path / "step-3", tiny_model, 3)
    script = """
import os, signal, sys, pathlib
from aglite.worker import checkpoint
checkpoint._sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)
sys.path.insert(0, sys.argv[3])
from test_checkpoint import save
save(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), 4)
"""
    here = os.path.dirname(__file__)
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "step-4", tiny_model, here], capture_output=True)
    assert done.returncode == -9, done.stderr
    assert (tmp_path / "step-4.tmp").exists() and not (tmp_path / "step-4").exists()
    assert_holds(tmp_path / "step-3", 3)
    save(tmp_path / "step-4", tiny_model, 4)
    assert_holds(tmp_path / "step-4", 4)
    assert not (tmp_path / "step-4.tmp").exists()


def test_damage_and_strangers_are_named(tiny_model, tmp_path):
    with pytest.raises(AgliteError, match="no checkpoint"):
        checkpoint.load(tiny_model)
    save(tmp_path / "step-3", tiny_model, 3)
    state = tmp_path / "step-3" / "trainer" / "state.pt"
    whole = state.read_bytes()
    torch.save({"rng": torch.get_rng_state()}, tmp_path / "part.pt")
    for damaged in (whole[:1000], b"", b"no tensors at all", (tmp_path / "part.pt").read_bytes()):
        state.write_bytes(damaged)
        with pytest.raises(AgliteError, match="step-3 is damaged"):
            checkpoint.load(tmp_path / "step-3")
    state.write_bytes(whole)
    assert_holds(tmp_path / "step-3", 3)
    about = tmp_path / "step-3" / "aglite.json"
    for text, said in (
        ('{"format": 99, "meta": {}}', "newer"),
        ('{"step": 3}', "no checkpoint"),
        ("[3]", "no checkpoint"),
        ('{"format": 1}', "damaged: KeyError: 'meta'"),
    ):
        about.write_text(text)
        with pytest.raises(AgliteError, match=said):
            checkpoint.load(tmp_path / "step-3")
