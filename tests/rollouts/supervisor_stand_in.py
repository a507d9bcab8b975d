"""A process with a launcher in it, to be killed by tests: `python supervisor_stand_in.py FOLDER`."""

import asyncio
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
    if os.fork() == 0: os.setsid(); os.fork()
    open(os.environ["MARK"], "a").write("x")
    time.sleep(300)
"""


async def main(folder: Path) -> None:
    mark = folder / "mark"
    bench = Bench(folder, AGENT, concurrency=3, env={"MARK": str(mark)})
    async with bench:
        worker = subprocess.Popen(["sleep", "300"], start_new_session=True)  # noqa: ASYNC220
        bench.launcher._reaper.add(worker.pid)
        tasks = [await bench.submit() for _ in range(5)]
        await until(lambda: mark.exists() and mark.stat().st_size >= PROCESSES, 30)
        (folder / "ready").write_text(f"{worker.pid} {bench.launcher._reaper.pid}")
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)  # a Ctrl-C that it survives
    asyncio.run(main(Path(sys.argv[1])))
