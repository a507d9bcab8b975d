"""Makes the README's pictures of the terminal UI:

    python docs/screenshot.py docs/images/up.svg
    python docs/screenshot.py docs/images/rollout.svg --size 120x30 \
        --keys 2,f,down,down,down,down,down,down,down,down,down,down,enter,tab,v

`--keys` are pressed before the picture is taken, `--size` is that of the terminal. With --dir the picture
shows that run, going or finished; without it, canned answers of a run in the middle of its
training, so that the picture can be made anywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from fake_daemon import NOW, FakeDaemon, running

from aglite.paths import RunDir
from aglite.tui.app import AgliteApp


async def shoot(
    app: AgliteApp, size: tuple[int, int], out: Path, keys: list[str], live: Callable[[int], None] = lambda _: None
) -> None:
    """Let the app look at the run for a while (`live` may change what there is to see), press keys and take its
    picture."""
    async with app.run_test(size=size) as pilot:
        for moment in range(60):
            live(moment)
            app.feed.hurry()
            await pilot.pause(0.05)
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.3)
        await pilot.pause(0.5)
        out.write_text(app.export_screenshot(title="aglite attach"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dir", type=Path, help="a run directory to show instead of the canned run")
    parser.add_argument("--size", default="144x40", help="columns x rows of the terminal")
    parser.add_argument("--keys", default="", help="keys to press, as Textual names them, comma-separated")
    options = parser.parse_args()
    keys = [key for key in options.keys.split(",") if key]
    os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    columns, _, rows = options.size.partition("x")
    size = int(columns), int(rows)
    if options.dir:
        asyncio.run(shoot(AgliteApp(RunDir(options.dir), clock=time.time), size, options.out, keys))
        return
    with tempfile.TemporaryDirectory() as folder:
        daemon = FakeDaemon(RunDir(Path(folder) / "instruct"), running())
        engine = daemon.scene["status"]["engine"]

        def live(moment: int) -> None:
            engine["tokens_per_s"] = 52 + 14 * math.sin(moment / 4) + 5 * math.sin(moment * 1.7)

        app = AgliteApp(daemon.run_dir, clock=lambda: NOW, interval_s=3600)
        asyncio.run(shoot(app, size, options.out, keys, live))
        daemon.end()


if __name__ == "__main__":
    main()
