"""From closing the gate to an idle engine: `python tests/benchmarks/preempt.py MODEL_FOLDER [--updates 200]`.

The model worker's own loop samples for several conversations at once, half of which begin with a prompt of 600
tokens. At random times it is asked to pre-empt, as before an update, and the time to its answer is taken, which it
gives when the engine does nothing any more. Beside it stand the steps of the engine: it can answer no later than at
the end of the one under way, and a prompt is computed in pieces of 256 tokens, so no step is long. Everything is
timed inside the worker's process, so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import queue
import random
import statistics
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from aglite.engine.base import SamplingParams
from aglite.worker.io import pack_ids
from aglite.worker.main import Worker

ENGINE = {"context_length": 1024, "max_running": 32, "kv_tokens": 32768, "threads": len(os.sched_getaffinity(0))}


class Line:
    """The supervisor's end of the worker's connection, in the same process."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[float, Any]] = queue.SimpleQueue()
        """(when, value) of calls"""
        self.batches: list[float] = []
        """When each step of the engine ended that sampled tokens."""
        self._draw = random.Random(0)
        self._number = 0
        self._vocabulary = 0

    def start(self) -> None: ...

    def send(self, frame: dict[str, Any]) -> None:
        """What the worker's compute thread says."""
        now = time.perf_counter()
        if frame["op"] == "tokens":
            self.batches.append(now)
            for item in frame["items"]:
                if item[4] is not None:
                    self.ask()
        elif frame["op"] == "error":
            raise SystemExit(frame["message"])
        elif frame["op"] == "result":
            self.answers.put((now, frame["value"]))

    def call(self, method: str, **args: Any) -> tuple[float, Any]:
        self.inbox.put({"op": "call", "id": 0, "method": method, "args": args})
        return self.answers.get()

    def begin(self, vocabulary: int, conversations: int) -> None:
        self._vocabulary = vocabulary
        for _ in range(conversations):
            self.ask()

    def ask(self) -> None:
        """Begin a conversation."""
        self._number += 1
        prompt = [self._draw.randrange(self._vocabulary) for _ in range(self._draw.choice((40, 600)))]
        params = dataclasses.asdict(SamplingParams(max_tokens=self._draw.randrange(20, 300)))
        self.inbox.put({"op": "generate", "id": self._number, "prompt": pack_ids(prompt), "params": params})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument(
        "--conversations",
        type=int,
        default=16,
        help="fewer for a large model: each update computes the KV cache of all of them anew",
    )
    options = parser.parse_args()
    line, draw = Line(), random.Random(1)
    threading.Thread(target=Worker(line).run, daemon=True).start()  # type: ignore[arg-type]
    _, info = line.call("init", model=str(options.model), engine=ENGINE)
    line.begin(info["vocab_size"], options.conversations)
    steps: list[float] = []
    answers: list[float] = []
    further: list[int] = []
    for number in range(options.updates):
        line.batches.clear()
        while len(line.batches) < 3:
            time.sleep(0.001)
        usual = (line.batches[-1] - line.batches[0]) / (len(line.batches) - 1)
        time.sleep(min(draw.uniform(3, 20) * usual, 0.5))
        asked = time.perf_counter()
        answered, _ = line.call("preempt")
        answers.append(answered - asked)
        further.append(sum(batch > asked for batch in line.batches))
        steps += [b - a for a, b in pairwise(line.batches)]
        line.call("resume", version=number + 1)
    line.call("preempt")  # its thread does nothing any more when this process ends under it
    print(f"{options.updates} times, {options.conversations} conversations, load {os.getloadavg()[0]:.1f}")
    print("ms: median, 99th percentile, largest")
    for name, values in (("engine step", steps), ("until it does nothing", answers)):
        values.sort()
        shown = (statistics.median(values), values[int(0.99 * len(values))], values[-1])
        print(f"  {name:24} {len(values):6} of them: " + ", ".join(f"{1e3 * value:8.1f}" for value in shown))
    counts = {number: further.count(number) for number in sorted(set(further))}
    print(f"  steps that ended after it was asked, the one under way included: {counts} (number: how often)")


if __name__ == "__main__":
    main()
