"""A stand-in for `vllm serve` as a process: real HTTP on the socket that it is told, no model, every call written down.

    AGLITE_VLLM="python tests/helpers/fake_vllm.py SETTINGS.json"

Settings (all may be changed while it runs): `record`, a file of one line a call; `start_s`; `token_s`; `refuse`
{path: [status, words]}; `hang` [path, ...]; `die_at` path (it kills itself there); `stale`: weights that are sent do
not arrive; `die_at_start` [words, ...] printed before it ends.
Its weights are a count of updates; tokens are ODD or above where that count is odd, and below where it is even.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # aglite starts it without PYTHONPATH, as another Python's

from aiohttp import web
from upstreams import VllmServer

from aglite.engine.scripted import trained_logprob
from aglite.gateway.tokenizer import TextTokenizer

ODD = 364
SHIFT = 64


class FakeVllm(VllmServer):
    def __init__(self, settings: Path, arguments: list[str]) -> None:
        flags = dict(itertools.pairwise(arguments))
        super().__init__(TextTokenizer(Path(flags["--model"])), model=flags["--served-model-name"])
        self.context_length = int(flags.get("--max-model-len", 2048))
        self.socket = flags["--uds"]
        self.settings = settings
        self.updates = 0
        self.asleep: set[str] = set()
        self.going = asyncio.Event()
        self.going.set()
        self.shared = shared_memory.SharedMemory(create=True, size=4096)  # with its EngineCore
        self.record(f"shares {self.shared.name}")
        self.record(f"start {os.getpid()} " + " ".join(arguments))

    def setting(self, name: str, default: Any = None) -> Any:
        return json.loads(self.settings.read_text()).get(name, default)

    def record(self, line: str) -> None:
        with open(self.setting("record", os.devnull), "a") as file:
            file.write(f"vllm {line}\n")

    async def serve(self) -> None:
        for line in self.setting("die_at_start", ()):
            print(line, flush=True)
        if self.setting("die_at_start"):
            raise SystemExit(1)
        print("INFO 01-01 00:00:00 [loader.py:1] Loading weights", flush=True)
        await asyncio.sleep(self.setting("start_s", 0))
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._serve_one)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, self.socket).start()
        await asyncio.Event().wait()

    async def _serve_one(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path not in ("/health", "/v1/completions", "/v1/models"):
            self.record(f"{request.path_qs} {(await request.read()).decode()}".strip())
        if path in self.setting("hang", ()):
            await asyncio.Event().wait()
        if path == self.setting("die_at"):
            print("CUDA error: an illegal memory access was encountered", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if path in self.setting("refuse", {}):
            status, words = self.setting("refuse")[path]
            return web.json_response({"error": {"message": words}}, status=status)
        order = getattr(self, "do_" + path.strip("/").replace("/", "_"), None)
        if order is not None:
            return web.json_response(await order(request) or {})
        return await self._serve(request)

    # the routes that vLLM has for training

    async def do_health(self, request: web.Request) -> None: ...

    async def do_pause(self, request: web.Request) -> None:
        self.going.clear()

    async def do_resume(self, request: web.Request) -> None:
        self.going.set()

    async def do_sleep(self, request: web.Request) -> None:
        self.asleep = {"weights", "kv_cache"}

    async def do_wake_up(self, request: web.Request) -> None:
        self.asleep -= set(request.query.getall("tags"))
        if not self.asleep:
            self.going.set()

    async def do_reset_prefix_cache(self, request: web.Request) -> dict[str, bool]:
        return {"success": True}

    async def do_collective_rpc(self, request: web.Request) -> None:
        folder = Path((await request.json())["kwargs"]["weights_path"])
        if not self.setting("stale"):
            self.updates = json.loads((folder / "updates.json").read_text())

    async def do_init_weight_transfer_engine(self, request: web.Request) -> None: ...

    async def do_start_weight_update(self, request: web.Request) -> None: ...

    async def do_update_weights(self, request: web.Request) -> None:
        self.updates = (await request.json())["update_info"]["updates"]

    async def do_finish_weight_update(self, request: web.Request) -> None: ...

    # generation

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/completions" and "prompt_logprobs" in self.requests[-1]:
            self.record("probe")
            row = self.requests[-1]["prompt"]
            told = [None, *({str(t): {"logprob": trained_logprob(t, at, self.updates)}} for at, t in enumerate(row))][
                2:
            ]
            return web.json_response({"choices": [{"prompt_logprobs": [None, *told]}]})
        if request.path == "/v1/completions":
            await self.going.wait()
        return await super().answer(request)

    async def next_token(self) -> None:
        await asyncio.sleep(self.setting("token_s", 0))
        await self.going.wait()

    def distribution(self, at: int, temperature: float) -> dict[int, float]:
        shift = SHIFT * (self.updates % 2)
        return {token + shift: value for token, value in super().distribution(at, temperature).items()}


def main() -> None:
    print("the fake vLLM begins", flush=True)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # its EngineCore
    asyncio.run(FakeVllm(Path(sys.argv[1]), sys.argv[2:]).serve())


if __name__ == "__main__":
    main()
