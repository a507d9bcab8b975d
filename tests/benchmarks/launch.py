"""What a rollout costs besides its agent: `python tests/benchmarks/launch.py [--rollouts 40]`.

The agent and the grader do nothing, so all that remains is overhead. Beside the launcher stand the same processes
started bare: one interpreter (the agent), and two in a row (agent and grader), which nothing can undercut. The times of
launcher and bare runs are interleaved, so that a busy machine is unfair to neither.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "rollouts")]

from bench import Bench  # noqa: E402

GRADE = "def grade(task, rollout, workdir):\n    return 1.0\n"
BARE = [sys.executable, "-c", "pass"]


def bare(processes: int) -> float:
    began = time.perf_counter()
    for _ in range(processes):
        subprocess.run(BARE, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    return time.perf_counter() - began


async def one(bench: Bench) -> float:
    began = time.perf_counter()
    outcome = await bench.run()
    assert outcome.state == "done", outcome
    return time.perf_counter() - began


async def latency(folder: Path, rollouts: int) -> None:
    times: dict[str, list[float]] = {"bare agent": [], "bare agent + grader": [], "launcher": []}
    async with Bench(folder, command=["python", "-c", "pass"], grade=GRADE) as bench:
        await one(bench)
        cpu = 0.0
        for _ in range(rollouts):
            times["bare agent"].append(bare(1))
            times["bare agent + grader"].append(bare(2))
            before = time.process_time()
            times["launcher"].append(await one(bench))
            cpu += time.process_time() - before
        print(f"one at a time, {rollouts} rollouts, median (and fastest) in ms")
        for name, values in times.items():
            print(f"  {name:22} {statistics.median(values) * 1e3:7.1f} ({min(values) * 1e3:.1f})")
        over = statistics.median(times["launcher"]) - statistics.median(times["bare agent + grader"])
        print(f"  {'launcher adds':22} {over * 1e3:7.1f}")
        print(f"  {'supervisor CPU':22} {cpu / rollouts * 1e3:7.1f}")


async def throughput(folder: Path, rollouts: int, concurrency: int) -> None:
    async with Bench(folder, command=["python", "-c", "pass"], grade=GRADE, concurrency=concurrency) as bench:
        began, cpu = time.perf_counter(), time.process_time()
        tasks = [await bench.submit() for _ in range(rollouts)]
        await asyncio.gather(*tasks)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        rate, each = 60 * rollouts / seconds, cpu / rollouts * 1e3
        print(f"  {concurrency:3} at once: {rate:6.0f} a minute, {each:.1f} ms of supervisor CPU each")


async def idle(folder: Path) -> None:
    async with Bench(folder, command=["sleep", "60"], concurrency=32) as bench:
        tasks = [await bench.submit() for _ in range(32)]
        while bench.launcher.counts()["running"] < 32:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        cpu = time.process_time()
        await asyncio.sleep(3)
        print(f"32 waiting agents: {(time.process_time() - cpu) / 3 * 100:.2f}% of a core")
        await bench.launcher.stop()
        await asyncio.gather(*tasks)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=40)
    rollouts = parser.parse_args().rollouts
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in ("latency", "idle", "1", "8", "16", "32"):
            (root / name).mkdir()
        await latency(root / "latency", rollouts)
        print(f"{2 * rollouts} rollouts")
        for concurrency in (1, 8, 16, 32):
            await throughput(root / str(concurrency), 2 * rollouts, concurrency)
        await idle(root / "idle")


if __name__ == "__main__":
    asyncio.run(main())
