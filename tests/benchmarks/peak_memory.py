"""Runs a command and prints the peak memory of it and all its descendants together.

    python tests/benchmarks/peak_memory.py -- aglite up recipes/instruct --headless

Memory is proportional set size (shared pages are counted once, divided among their users), looked at once a second; a
process in a session of its own (an agent, a worker) still counts, since its ancestors lead to the command.
"""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

SECONDS = 1.0


def tree_memory(root: psutil.Process) -> dict[str, int]:
    """Bytes of proportional set size by kind of process, `root` included."""
    sizes: dict[str, int] = {}
    for process in [root, *root.children(recursive=True)]:
        try:
            words = process.cmdline()
            size = process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        name = " ".join(words[1:3]) if len(words) > 1 else process.name()
        sizes[name] = sizes.get(name, 0) + size
    return sizes


def main() -> int:
    command = [word for word in sys.argv[1:] if word != "--"]
    if not command:
        print(__doc__)
        return 2
    child = subprocess.Popen(command)
    root = psutil.Process(child.pid)
    peak: dict[str, int] = {}
    while child.poll() is None:
        try:
            now = tree_memory(root)
        except psutil.NoSuchProcess:
            break
        if sum(now.values()) > sum(peak.values()):
            peak = now
        time.sleep(SECONDS)
    gib = sum(peak.values()) / 2**30
    print(f"peak of the whole tree: {gib:.2f} GiB")
    for name, size in sorted(peak.items(), key=lambda item: -item[1])[:5]:
        print(f"  {size / 2**30:.2f} GiB  {name}")
    return child.wait()


if __name__ == "__main__":
    sys.exit(main())
