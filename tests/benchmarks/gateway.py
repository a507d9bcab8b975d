"""What the gateway costs: calls/s, added latency, CPU, memory and bytes on disk, with an engine that takes no time.

    python tests/benchmarks/gateway.py [--concurrency 1 64 256] [--turns 10] [--stream] [--model FOLDER] [--calls N]

Each concurrent agent plays rollouts of `--turns` growing turns over real sockets against a gateway in a process of its
own, with the real store and the tokenizer of the model folder (default: a tiny one made on the spot). The engine is in
the gateway's process and answers at once, so all that is measured is the gateway and, in the latency, the client. Each
rollout's session is closed when it has ended, as the launcher does. With `--calls`, rollouts go on until so many calls
are made (is memory flat?).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from tiny import tiny_model

from aglite.config import GatewaySettings, Limits, TrainSampling
from aglite.engine.base import Chunk, EngineInfo, EngineStats, SamplingParams
from aglite.gateway.app import create_model_app
from aglite.gateway.gateway import Gateway
from aglite.gateway.renderers import load_renderer
from aglite.net import Listener, allow_many_files, bind, collect_rarely
from aglite.store import Store

WORDS = "the of and to in is it you that he was for on are with as his they be at one have this from or had by"


class InstantEngine:
    """Makes replies up, eight tokens a chunk."""

    def __init__(self, vocab_size: int, length: int) -> None:
        self.info = EngineInfo("instant", "instant", 1 << 20, vocab_size)
        rng = random.Random(0)
        self._ids = rng.choices(range(300, vocab_size), k=1 << 16)
        self._logprobs = [-rng.expovariate(3.0) for _ in range(1 << 16)]
        self._at = itertools.count(0, 7)
        self._length = length

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[Chunk]:
        start = next(self._at) % (len(self._ids) - self._length)
        for at in range(start, start + self._length, 8):
            await asyncio.sleep(0)
            stop = min(at + 8, start + self._length)
            reason = "stop" if stop == start + self._length else None
            yield Chunk(self._ids[at:stop], self._logprobs[at:stop], 0, reason)

    async def preempt(self) -> None: ...

    async def resume(self, version: int) -> None: ...

    async def stats(self) -> EngineStats:
        return EngineStats()


async def tell(pipe: Connection, word: Any) -> None:
    """Send down a pipe that the loop reads, and so does not block: it may be full for a moment."""
    while True:
        try:
            return pipe.send(word)
        except BlockingIOError:
            await asyncio.sleep(0.001)


# the gateway's process


def serve(pipe: Connection, model_dir: Path, db: Path, length: int) -> None:
    uvloop.run(_serve(pipe, model_dir, db, length))


async def _serve(pipe: Connection, model_dir: Path, db: Path, length: int) -> None:
    """Open a rollout for each "open" that comes down the pipe, close the one that any other word names."""
    allow_many_files()
    collect_rarely()
    renderer = load_renderer(model_dir)
    engine = InstantEngine(renderer.tokenizer.vocab_size, length)
    store = Store.open(db)
    gateway = Gateway(
        engine, store, renderer, model_name="m", settings=GatewaySettings(), context_length=engine.info.context_length
    )
    listener = Listener(create_model_app(gateway), bind("127.0.0.1", 0, "the gateway", "port"))
    await listener.start()
    await store.add_group("g", "task", "train", 1)
    limits, numbers = Limits(calls=1000, sampled_tokens=1 << 30), itertools.count()
    pipe.send(listener.url)
    ended, tasks, loop = asyncio.Event(), set(), asyncio.get_running_loop()

    async def open_one() -> None:
        rollout_id = f"r-{next(numbers)}"
        await store.add_rollout(rollout_id, "task", "g", "train", "external")
        session = gateway.open_session(rollout_id, 1, limits, TrainSampling())
        await tell(pipe, (rollout_id, session.token))

    def heard() -> None:
        while pipe.poll():
            word = pipe.recv()
            if word == "end":
                ended.set()
                return
            task = loop.create_task(open_one() if word == "open" else gateway.close_session(word))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    loop.add_reader(pipe.fileno(), heard)
    await ended.wait()
    await listener.stop()
    await gateway.stop()
    store.close()


# the agents


class Agents:
    def __init__(self, args: argparse.Namespace, pipe: Connection, url: str, session: aiohttp.ClientSession) -> None:
        self.args, self.pipe, self.url, self.session = args, pipe, url, session
        self.latencies: list[float] = []
        self.tokens = 0
        self.text_bytes = 0
        self._opened: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._rng = random.Random(1)
        asyncio.get_running_loop().add_reader(pipe.fileno(), self._heard)

    def _heard(self) -> None:
        while self.pipe.poll():
            self._opened.put_nowait(self.pipe.recv())

    def words(self, count: int) -> str:
        return " ".join(self._rng.choices(WORDS.split(), k=count))

    async def play(self) -> None:
        """One rollout."""
        await tell(self.pipe, "open")
        rollout_id, token = await self._opened.get()
        headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        url = f"{self.url}/rollouts/{rollout_id}/v1/chat/completions"
        options = {"model": "m", "stream": self.args.stream, "stream_options": {"include_usage": True}}
        messages = [{"role": "user", "content": self.words(self.args.prompt)}]
        usage: dict[str, int] = {}
        for _ in range(self.args.turns):
            body = orjson.dumps({"messages": messages, **options})
            started = time.perf_counter()
            async with self.session.post(url, data=body, headers=headers) as response:
                data = await response.read()
            self.latencies.append(time.perf_counter() - started)
            if response.status != 200:
                raise SystemExit(f"HTTP {response.status}: {data[:300]!r}")
            text, usage = _read(data, self.args.stream)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": self.words(128)}]
        self.tokens += usage["prompt_tokens"] + usage["completion_tokens"]
        self.text_bytes += len(orjson.dumps(messages[:-1]))
        await tell(self.pipe, rollout_id)

    async def run(self, concurrency: int, rollouts: int) -> float:
        """Play so many rollouts; seconds it took."""
        left = iter(range(rollouts))

        async def agent() -> None:
            for _ in left:
                await self.play()

        started = time.perf_counter()
        await asyncio.gather(*(agent() for _ in range(concurrency)))
        return time.perf_counter() - started


def _read(data: bytes, stream: bool) -> tuple[str, dict[str, int]]:
    if not stream:
        reply = orjson.loads(data)
        return reply["choices"][0]["message"]["content"], reply["usage"]
    events = [orjson.loads(event[6:]) for event in data.split(b"\n\n") if event.startswith(b"data: {")]
    parts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    return "".join(parts), events[-1]["usage"]


async def measure(args: argparse.Namespace, model_dir: Path, concurrency: int, folder: Path) -> dict[str, Any]:
    rollouts = args.calls // args.turns if args.calls else max(32, 2 * concurrency)
    ours, theirs = multiprocessing.Pipe()
    db = folder / f"{concurrency}.db"
    gateway = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, model_dir, db, args.response))
    gateway.start()
    try:
        url = ours.recv()
        process = psutil.Process(gateway.pid)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            agents = Agents(args, ours, url, session)
            await agents.run(concurrency, max(4, concurrency))  # warm-up
            agents.latencies.clear()
            before = process.cpu_times(), process.memory_info().rss
            seconds = await agents.run(concurrency, rollouts)
            cpu, rss = process.cpu_times(), process.memory_info().rss
            asyncio.get_running_loop().remove_reader(ours.fileno())
    finally:
        await tell(ours, "end")
        gateway.join(20)
    disk = db.stat().st_size  # the write-ahead log is in it now
    calls, ordered = len(agents.latencies), sorted(agents.latencies)
    used = cpu.user + cpu.system - before[0].user - before[0].system
    return {
        "concurrency": concurrency,
        "calls": calls,
        "calls_per_s": round(calls / seconds, 1),
        "p50_ms": round(1000 * ordered[calls // 2], 2),
        "p95_ms": round(1000 * ordered[calls * 95 // 100], 2),
        "cpu_ms_per_call": round(1000 * used / calls, 3),
        "rss_mib": [before[1] >> 20, rss >> 20],
        "rss_bytes_per_call": round((rss - before[1]) / calls),
        "recorded_tokens": agents.tokens,
        "disk_bytes_per_token": round(disk / agents.tokens, 2),
        "disk_bytes_per_token_without_text": round((disk - agents.text_bytes) / agents.tokens, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--prompt", type=int, default=1024, help="words of the first message")
    parser.add_argument("--response", type=int, default=64, help="tokens of a reply")
    parser.add_argument("--calls", type=int, default=0, help="calls to make in all, by default a few rollouts an agent")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--model", type=Path, help="a model folder, for its tokenizer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aglite-bench-") as folder:
        model_dir = args.model or tiny_model(Path(folder) / "model")
        for concurrency in args.concurrency:
            print(json.dumps(uvloop.run(measure(args, model_dir, concurrency, Path(folder)))), flush=True)


if __name__ == "__main__":
    main()
