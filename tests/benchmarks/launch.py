"""What a rollout costs besides its agent: `python tests/benchmarks/launch.py [--rollouts 40] [--image aglite/python]`.

The agent and the grader do nothing, so all that remains is overhead. Beside the launcher stand the same processes
started bare, which nothing can undercut: for local agents two interpreters in a row (agent and grader), for containers
`docker run` of the same program. The runs of all kinds are interleaved, so that a busy machine is unfair to none, and
ratios are of medians. Cold is a launch that makes its sidecar first, warm one that finds an idle one.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers")]

from bench import Bench  # noqa: E402

GRADE = "def grade(task, rollout, workdir):\n    return 1.0\n"
NOTHING = ["-c", "pass"]
AT_ONCE = (1, 4, 16)


async def process(*command: str) -> None:
    started = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
    )
    assert await started.wait() == 0, command


async def bare() -> None:
    for _ in range(2):  # agent and grader
        await process(sys.executable, *NOTHING)


async def rollout(bench: Bench) -> None:
    outcome = await bench.run()
    assert outcome.state == "done", outcome


async def rollouts(bench: Bench, number: int) -> None:
    for outcome in await asyncio.gather(*[await bench.submit() for _ in range(number)]):
        assert outcome.state == "done", outcome


def place(root: Path, name: str, concurrency: int, **section: str) -> Bench:
    (root / name).mkdir()
    return Bench(root / name, command=["python", *NOTHING], grade=GRADE, concurrency=concurrency, **section)


async def seconds(what: Awaitable[None]) -> float:
    began = time.perf_counter()
    await what
    return time.perf_counter() - began


def table(times: dict[str, list[float]]) -> None:
    """Medians, with what they are of the first row's."""
    first = statistics.median(next(iter(times.values())))
    for name, values in times.items():
        median = statistics.median(values)
        print(f"| {name} | {median * 1e3:.0f} ms | {median / first:.2f} |")


async def one_at_a_time(root: Path, number: int, image: str | None) -> None:
    print(f"\n| one at a time, {number} of each | median | ratio |\n| --- | ---: | ---: |")
    local: dict[str, list[float]] = {"agent and grader, bare": [], "local rollout": []}
    async with place(root, "local", 1) as bench:
        await rollout(bench)
        cpu = 0.0
        for _ in range(number):
            local["agent and grader, bare"].append(await seconds(bare()))
            before = time.process_time()
            local["local rollout"].append(await seconds(rollout(bench)))
            cpu += time.process_time() - before
    table(local)
    print(f"| the supervisor's share of a core's time | {cpu / number * 1e3:.0f} ms | |")
    if image is None:
        return
    plain = ("docker", "run", "--rm", "--network=none", image, "python", *NOTHING)
    docker: dict[str, list[float]] = {"`docker run`": [], "rollout, cold": [], "rollout, warm": []}
    await process(*plain)
    async with place(root, "docker", 1, image=image) as bench:
        sidecars = bench.launcher._backend._sidecars
        await rollout(bench)
        for _ in range(number):
            await sidecars._idle.pop().discard()
            docker["`docker run`"].append(await seconds(process(*plain)))
            docker["rollout, cold"].append(await seconds(rollout(bench)))
            docker["rollout, warm"].append(await seconds(rollout(bench)))
    table(docker)


async def plain_at_once(number: int, concurrency: int, one: Callable[[], Awaitable[None]]) -> None:
    slots = asyncio.Semaphore(concurrency)

    async def in_turn() -> None:
        async with slots:
            await one()

    await asyncio.gather(*(in_turn() for _ in range(number)))


async def many_at_once(root: Path, number: int, image: str | None) -> None:
    """Rollouts a minute; each measurement is split in two halves around that of its bare counterpart."""
    print(f"\n| {number} of each, a minute | " + " | ".join(f"{n} at once" for n in AT_ONCE) + " |")
    print("| --- |" + " ---: |" * len(AT_ONCE))
    kinds: dict[str, tuple[Callable[[], Awaitable[None]], dict[str, str]]] = {"local": (bare, {})}
    if image is not None:
        plain = ("docker", "run", "--rm", "--network=none", image, "python", *NOTHING)
        kinds["docker"] = (lambda: process(*plain), {"image": image})
    for kind, (one, section) in kinds.items():
        rates: dict[str, list[float]] = {"bare": [], "rollouts": []}
        for concurrency in AT_ONCE:
            took = {"bare": 0.0, "rollouts": 0.0}
            async with place(root, f"{kind}{concurrency}", concurrency, **section) as bench:
                await rollouts(bench, concurrency)
                took["rollouts"] += await seconds(rollouts(bench, number // 2))
                took["bare"] += await seconds(plain_at_once(number, concurrency, one))
                took["rollouts"] += await seconds(rollouts(bench, number - number // 2))
            for name in rates:
                rates[name].append(60 * number / took[name])
        print(f"| {kind}, bare | " + " | ".join(f"{rate:.0f}" for rate in rates["bare"]) + " |")
        pairs = zip(rates["rollouts"], rates["bare"], strict=True)
        print(f"| {kind} rollouts | " + " | ".join(f"{rate:.0f} ({rate / one:.2f})" for rate, one in pairs) + " |")


async def first_ones(root: Path, image: str) -> None:
    """When the first rollouts of a run begin, from the start of its launcher."""
    agent = "import time; print(time.time()); time.sleep(60)"
    (root / "first").mkdir()
    bench = Bench(root / "first", agent, image=image, concurrency=16)
    began = time.time()
    async with bench:
        tasks = [await bench.submit() for _ in range(16)]
        while bench.launcher.counts()["running"] < 16:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        logs = [bench.run_dir.rollout_log(task.rollout_id, 1).read_text() for task in tasks]
        await bench.launcher.stop()
    at = sorted(float(log) - began for log in logs)
    print(f"\nthe first 16 agents in containers begin after {', '.join(f'{when:.1f}' for when in at)} s")


async def idle(root: Path) -> None:
    (root / "idle").mkdir()
    async with Bench(root / "idle", command=["sleep", "60"], concurrency=32) as bench:
        tasks = [await bench.submit() for _ in range(32)]
        while bench.launcher.counts()["running"] < 32:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        cpu = time.process_time()
        await asyncio.sleep(3)
        print(f"\n32 waiting agents: {(time.process_time() - cpu) / 3 * 100:.2f}% of a core")
        await bench.launcher.stop()
        await asyncio.gather(*tasks)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=40)
    parser.add_argument("--image", help="measure Docker too, with this image")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        await one_at_a_time(root, options.rollouts, options.image)
        await many_at_once(root, 2 * options.rollouts, options.image)
        if options.image:
            await first_ones(root, options.image)
        await idle(root)


if __name__ == "__main__":
    asyncio.run(main())
