"""What the terminal UI costs on a long run: `python tests/benchmarks/tui.py [--rollouts 1000] [--calls 20]`.

A run of that many rollouts with that many calls each is recorded, and served by a control API in a process of its own,
where some of its rollouts go on changing state. The UI runs in a pseudo-terminal of 200x50, in another process:

- first paint: from the end of the imports to the first screen with the run on it;
- CPU, in percent of one core, idle on each screen while the run goes on;
- key to screen: from writing a key to the last byte of what it changes (median, 95th percentile, longest).
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import pty
import re
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import psutil

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers")]

CHILD = """
import sys, time
from pathlib import Path
from aglite.paths import RunDir
from aglite.tui.app import AgliteApp
began = time.perf_counter()
app = AgliteApp(RunDir(Path(sys.argv[1])))
show, paint = app._show, Path(sys.argv[2])
def showing(snapshot):
    show(snapshot)
    if not paint.exists():
        app.call_after_refresh(lambda: paint.write_text(str(time.perf_counter() - began)))
app._show = showing
app.run()
"""

SERVER = """
import sys
sys.path[:0] = [sys.argv[1]]
from long_run import serve
serve(sys.argv[2])
"""

QUIET_S = 0.03
"""Nothing more comes for a key when nothing came for so long."""


class Screen:
    """The UI in a pseudo-terminal."""

    def __init__(self, run_dir: Path, paint: Path) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(run_dir), str(paint)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)

    def read(self, seconds: float) -> bytes:
        """What comes within `seconds`."""
        data, until = b"", time.perf_counter() + seconds
        while (left := until - time.perf_counter()) > 0:
            if select.select([self._master], [], [], left)[0]:
                data += os.read(self._master, 1 << 16)
        return data

    def press(self, key: str) -> float:
        """Seconds from a key to the last byte it brought."""
        self.read(0.05)
        began = last = time.perf_counter()
        os.write(self._master, key.encode())
        while select.select([self._master], [], [], QUIET_S if last > began else 2.0)[0]:
            os.read(self._master, 1 << 16)
            last = time.perf_counter()
            if last - began > 2:
                break
        return last - began

    def cpu(self, seconds: float) -> float:
        """Percent of one core over `seconds`."""
        process = psutil.Process(self.process.pid)
        before = process.cpu_times()
        began = time.perf_counter()
        self.read(seconds)
        after = process.cpu_times()
        used = after.user + after.system - before.user - before.system
        return 100 * used / (time.perf_counter() - began)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each CPU figure")
    options = parser.parse_args()
    from long_run import record

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "long"
        asyncio.run(record(run_dir, options.rollouts, options.calls))
        server = subprocess.Popen([sys.executable, "-c", SERVER, sys.path[0], str(run_dir)])
        while not (run_dir / "control.json").exists():
            time.sleep(0.1)
        paint = Path(folder) / "paint"
        screen = Screen(run_dir, paint)
        try:
            report(screen, paint, options.rollouts, options.calls, options.seconds)
        finally:
            screen.close()
            server.kill()


def report(screen: Screen, paint: Path, rollouts: int, calls: int, seconds: float) -> None:
    shown = b""
    while not paint.exists():
        shown += screen.read(0.2)
    shown += screen.read(3.0)
    assert re.search(rb"live", shown), shown[-2000:]
    print(f"{rollouts} rollouts, {rollouts * calls} calls, terminal 200x50")
    print(f"first paint {float(paint.read_text()) * 1e3:.0f} ms after the imports")
    for key, name in (
        ("1", "run"),
        ("2", "rollouts"),
        ("3", "steps"),
        ("4", "sandboxes"),
        ("5", "events"),
        ("6", "recipe"),
    ):
        screen.press(key)
        screen.read(3.0)
        print(f"idle on {name:10} {screen.cpu(seconds):5.1f}% of a core")
    for key, name, keys in (("2", "rollouts", "jjjjj\x06\x06jjkkGkkgooo"), ("5", "events", "kkkkk\x02\x02gjjjjGkk")):
        screen.press(key)
        screen.read(1.0)
        pressed = sorted((screen.press(each), number, each) for number, each in enumerate(keys * 3))
        times = [took for took, _, _ in pressed]
        took, number, key = pressed[-1]
        print(
            f"keys on {name:10} median {statistics.median(times) * 1e3:.0f} ms, "
            f"95% {times[int(len(times) * 0.95)] * 1e3:.0f} ms, longest {took * 1e3:.0f} ms ({key!r}, no. {number})"
        )
    times = sorted(screen.press(each) for each in "1256" * 5)
    print(f"from screen to screen median {statistics.median(times) * 1e3:.0f} ms, longest {times[-1] * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
