"""Items about whole runs: `aglite up` with vLLM and trainer on one GPU, as a person would start it."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from aglite.errors import StoreError
from aglite.gpus import gpus
from aglite.paths import RunDir
from aglite.selftest.bench import Bench, Failed, Figures, Skip, expect
from aglite.store import Store

STEPS = 2
UP_TIMEOUT_S = 1800
GONE_S = 60


def up(bench: Bench) -> Figures:
    """Two steps of the recipe `instruct` with vLLM: rollouts, updates, a checkpoint; no warning about the weights."""
    run_dir = RunDir(bench.folder("up") / "run")
    _run(_command(bench, run_dir.path), run_dir.path.parent)
    store = Store.open(run_dir.db, readonly=True)
    try:
        steps = store.steps()
        warnings = [event["text"] for event in store.events() if event["level"] == "warning"]
    finally:
        store.close()
    expect(len(steps) == STEPS, f"{len(steps)} steps were made, {STEPS} were asked for")
    applied = [row for row in steps if row["state"] == "applied"]
    if not applied:
        raise Skip("all rollouts got the same reward, so nothing was learned; another model tells more")
    return {
        "applied": len(applied),
        **_figures(applied[-1]["metrics"]),
        **({"warnings": " | ".join(warnings)} if warnings else {}),
    }


def reaping(bench: Bench) -> Figures:
    """A supervisor that is killed takes vLLM, its EngineCore and the trainer with it; the GPU's memory comes back."""
    folder = bench.folder("reaping")
    run_dir, used = RunDir(folder / "run"), _used()
    with (folder / "out.log").open("w") as log:
        process = subprocess.Popen(
            _command(bench, run_dir.path, steps=50), stdout=log, stderr=subprocess.STDOUT, cwd=folder
        )
    try:
        children = _wait_for_rollouts(process, run_dir)
        started = time.monotonic()
        process.send_signal(signal.SIGKILL)
        process.wait()
        left = psutil.wait_procs(children, timeout=GONE_S)[1]
        expect(not left, f"{len(left)} processes are alive after {GONE_S} s: {', '.join(one.name() for one in left)}")
        gone_s = time.monotonic() - started
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    deadline = time.monotonic() + GONE_S
    while (now := _used()) > used + 2**28 and time.monotonic() < deadline:
        time.sleep(0.5)
    expect(now <= used + 2**28, f"{(now - used) / 2**30:.1f} GiB of the GPU stay in use")
    return {"gone_s": round(gone_s, 1), "processes": len(children)}


def several_gpus(bench: Bench) -> Figures:
    """trainer.n_gpus: 2, over verl's Ray path."""
    if len(gpus({})) < 2:
        raise Skip("there is one GPU")
    folder = bench.folder("several")
    _run([*_command(bench, folder / "run"), "--set", "trainer.n_gpus=2"], folder)
    return {}


def _command(bench: Bench, run_dir: Path, steps: int = STEPS) -> list[str]:
    """`aglite up` on the shipped recipe, small."""
    settings: dict[str, Any] = {
        "model": bench.model,
        "trainer.device": bench.device,
        "trainer.min_free_disk_mb": 0,
        "engine.kind": "vllm",
        "engine.context_length": 512,
        "engine.gpu_memory_utilization": 0.5,
        "algorithm.group_size": 4,
        "algorithm.groups_per_step": 2,
        "algorithm.groups_in_flight": 4,
        "algorithm.kl": 0,
        "evaluation.before": "false",
        "evaluation.tasks": 2,
    }
    command = [sys.executable, "-m", "aglite", "up", "instruct", "--headless", "--dir", str(run_dir)]
    command += ["--steps", str(steps)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return command


def _run(command: list[str], folder: Path) -> None:
    """A whole run, which has to end well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=UP_TIMEOUT_S, cwd=folder)
    lines = (done.stdout + done.stderr).strip().splitlines()
    expect(done.returncode == 0, f"exit code {done.returncode}: " + " | ".join(lines[-6:]))


def _wait_for_rollouts(process: subprocess.Popen[Any], run_dir: RunDir) -> list[psutil.Process]:
    """All processes of a run once its first rollout is done."""
    deadline = time.monotonic() + UP_TIMEOUT_S
    while time.monotonic() < deadline:
        expect(
            process.poll() is None,
            f"the run ended with exit code {process.returncode}; see {run_dir.path.parent}/out.log",
        )
        with contextlib.suppress(StoreError):  # it is not there yet, or just being made
            store = Store.open(run_dir.db, readonly=True)
            try:
                done = store.rollouts("done", limit=1)
            finally:
                store.close()
            if done:
                return psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.5)
    raise Failed(f"no rollout was done within {UP_TIMEOUT_S} s")


def _figures(metrics: dict[str, Any]) -> Figures:
    """What is worth telling of a step."""
    names = ("seconds", "logprob_gap_mean", "logprob_gap_max", "grad_norm", "reward_mean", "gpu_peak_mb")
    found = {name: metrics[name] for name in names if metrics.get(name) is not None}
    peaks = found.pop("gpu_peak_mb", {})
    return {**found, **{f"{phase}_mb": peak for phase, peak in peaks.items()}}


def _used() -> int:
    found = gpus({})
    return found[0]["mem_used"] if found else 0
