"""aglite's gateway alone, for a benchmark that drives gateways from outside: real store, real sockets, the vLLM client.

    BENCH_PORT=... BENCH_ENGINE_URL=... BENCH_MODEL=... BENCH_ROLLOUTS=... BENCH_TOKENS=... BENCH_DB=... \
        python tests/benchmarks/gateway_server.py MODEL_FOLDER

Opens BENCH_ROLLOUTS rollouts, writes their bearer tokens to BENCH_TOKENS ({rollout id: token}) and serves until it is
ended. The engine is not tried out first: stand-ins make their tokens up, so their log-probabilities mean nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import uvloop

from aglite.config import GatewaySettings, Limits, TrainSampling
from aglite.engine.vllm import VllmEngine
from aglite.gateway.app import create_model_app
from aglite.gateway.gateway import Gateway
from aglite.gateway.renderers import load_renderer
from aglite.net import Listener, allow_many_files, bind, collect_rarely
from aglite.store import Store


async def serve(model_dir: Path) -> None:
    settings = os.environ
    allow_many_files()
    collect_rarely()
    renderer = load_renderer(model_dir)
    engine = VllmEngine(settings["BENCH_ENGINE_URL"], renderer.tokenizer, model=settings["BENCH_MODEL"])
    await engine.connect()
    store = Store.open(settings["BENCH_DB"])
    gateway = Gateway(
        engine,
        store,
        renderer,
        model_name=settings["BENCH_MODEL"],
        settings=GatewaySettings(),
        context_length=engine.info.context_length,
    )
    limits = Limits(calls=1_000_000, sampled_tokens=1_000_000_000)
    tokens = {}
    await store.add_group("g", "task", "train", int(settings["BENCH_ROLLOUTS"]))
    for number in range(int(settings["BENCH_ROLLOUTS"])):
        rollout_id = f"r-{number}"
        await store.add_rollout(rollout_id, "task", "g", "train", "external")
        tokens[rollout_id] = gateway.open_session(rollout_id, 1, limits, TrainSampling()).token
    listener = Listener(
        create_model_app(gateway), bind("127.0.0.1", int(settings["BENCH_PORT"]), "the gateway", "BENCH_PORT")
    )
    await listener.start()
    Path(settings["BENCH_TOKENS"]).write_text(json.dumps(tokens))
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
    await listener.stop()
    await gateway.stop()
    await engine.stop()
    store.close()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1])))
