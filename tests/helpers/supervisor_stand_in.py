"""A process with a launcher in it, to be killed by tests: `python supervisor_stand_in.py FOLDER [IMAGE | SECTION]`.

With an image its agents are containers, some of which pass by; with an agent section as JSON, what that says; without,
processes that stay.
"""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

from bench import Bench, until

PROCESSES = 3 * 3
"""Those of three agents that say that they run; each has started two more."""

AGENT = """
    import os, subprocess, time
    subprocess.Popen(["setsid", "sleep", "300"])
    subprocess.Popen(["sleep", "300"])
    hidden = subprocess.Popen(["env", "-i", "setsid", "sleep", "300"])
    open(os.environ["HIDDEN"], "a").write(f"{hidden.pid}\\n")
    if os.fork() == 0: os.setsid(); os.fork()
    open(os.environ["MARK"], "a").write("x")
    time.sleep(300)
"""


IN_CONTAINERS = """
    import os, subprocess, time
    subprocess.Popen(["setsid", "sleep", "300"])
    print("running", flush=True)
    time.sleep(0.5 if os.environ["AGLITE_ROLLOUT_ID"][-1] in "0123" else 300)
"""
PASSES_BY = "0123"
"""The last letters of the ids of those rollouts."""


async def containers(folder: Path, image: str) -> None:
    section = json.loads(image) if image.startswith("{") else {"image": image}
    async with Bench(folder, IN_CONTAINERS, concurrency=4, **section) as bench:
        tasks = [await bench.submit() for _ in range(40)]

        def stay() -> list[str]:
            running = [one["rollout_id"] for one in bench.launcher.sandboxes() if one["state"] == "running"]
            return [name for name in running if name[-1] not in PASSES_BY]

        await until(lambda: len(stay()) >= 3, 120)
        (folder / "ready").write_text(str(bench.launcher._reaper.pid))
        await asyncio.gather(*tasks)


async def main(folder: Path) -> None:
    mark = folder / "mark"
    bench = Bench(folder, AGENT, concurrency=3, env={"MARK": str(mark), "HIDDEN": str(folder / "hidden")})
    async with bench:
        worker = subprocess.Popen(["sleep", "300"], start_new_session=True)  # noqa: ASYNC220
        bench.launcher._reaper.add(worker.pid)
        tasks = [await bench.submit() for _ in range(5)]
        await until(lambda: mark.exists() and mark.stat().st_size >= PROCESSES, 120)
        (folder / "ready").write_text(f"{worker.pid} {bench.launcher._reaper.pid}")
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)  # a Ctrl-C that it survives
    asyncio.run(containers(Path(sys.argv[1]), sys.argv[2]) if sys.argv[2:] else main(Path(sys.argv[1])))
