"""vLLM as the engine of a training run: paused, put to sleep, given new weights, and let go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import orjson

from aglite.engine.out_of_memory import MENDS, is_out_of_memory, out_of_memory
from aglite.engine.upstream import Unreachable
from aglite.engine.vllm import PATH, VllmEngine
from aglite.engine.vllm_server import NAME, VllmServer
from aglite.errors import EngineError
from aglite.gateway.tokenizer import TextTokenizer

CONTROL_TIMEOUT_S = 600.0
"""How long vLLM may take to pause, sleep, load or wake before it counts as hung."""
STALL_S = 300.0
"""How long all generations that wait for a token may get none, one after the other, before it counts as hung."""
QUIET_S = 30
"""From when on the status says that it gives none."""


class OwnVllm(VllmEngine):
    """The policy version of a token is that of the weights in force when vLLM sent it.

    vLLM itself holds generations (`/pause?mode=keep`), keeps what they have sampled, and computes their KV cache again
    when they go on. Nothing is given out in one piece: such a response could not say where the weights changed.
    """

    gives_whole = False

    def __init__(self, server: VllmServer, tokenizer: TextTokenizer) -> None:
        super().__init__("http://vllm", tokenizer)
        self.server = server
        self.owners: dict[int, str] = {}
        """Which processes may hold memory, by id, for errors to name."""
        self.asleep = False
        self.has_weights = True
        """Whether it holds weights at all: the second level of sleep drops them."""
        self._paused = False
        self._pausing = False
        self._transfers = False
        self._stall: asyncio.Task[None] | None = None
        self.waited_s = 0
        """How long somebody has waited for a token since the last one."""

    async def start(self) -> None:
        """Wait until the server serves, and try it out. Raises EngineError."""
        await self.server.ready()
        self._server = self.server.upstream
        await super().start()
        self._stall = asyncio.create_task(self._watch_stall())

    async def stop(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
        await self.server.stop()

    # one update, in this order

    async def preempt(self) -> None:
        """Hold every generation after the token it is at; they wait for `resume`."""
        mode = "keep" if self._counter.running else "wait"
        self._pausing = True
        try:
            await self._control(f"/pause?mode={mode}&clear_cache=true", "pause")
            self._paused = True
        finally:
            self._pausing = False

    async def sleep(self, level: int) -> None:
        """Free the accelerator: level 1 moves the weights to host memory, 2 drops them; both drop the KV cache."""
        await self._control(f"/sleep?level={level}&mode=keep", "sleep")
        self.asleep, self.has_weights = True, level == 1

    async def wake_weights(self) -> None:
        """Make room for the weights again, or fetch them from host memory."""
        if self.asleep:
            await self._control("/wake_up?tags=weights", "wake")

    async def load_folder(self, folder: Path) -> None:
        """Take the weights in a Hugging Face folder."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._control("/collective_rpc", "transfer", call)
        self.has_weights = True
        await self.server.note_shared()  # a bar that shows how far it is has a lock between processes

    async def load_parcels(self, parcels: AsyncIterator[dict[str, Any]]) -> None:
        """Take the weights out of GPU memory that another process holds, parcel by parcel (see aglite.worker.parcels);
        the next one is asked for when the one before has been copied."""
        if not self._transfers:
            await self._control("/init_weight_transfer_engine", "transfer", {"init_info": {}})
            self._transfers = True
        await self._control("/start_weight_update", "transfer", {"is_checkpoint_format": True})
        async for parcel in parcels:
            await self._control("/update_weights", "transfer", {"update_info": parcel})
        await self._control("/finish_weight_update", "transfer", {})
        self.has_weights = True

    async def resume(self, version: int) -> None:
        """Go on with the weights that are there as policy `version`; nothing that older ones computed is used again.

        A vLLM that slept goes on sampling as soon as its KV cache is back: so what has arrived until now is told from
        what comes before that.
        """
        self._version = version  # before the others are told, which takes time: what begins meanwhile waits in vLLM
        await asyncio.gather(*(events.note(version) for events in self._streams))
        if self._paused:
            answer = await self._control("/reset_prefix_cache", "transfer")
            if answer and orjson.loads(answer).get("success") is False:
                raise EngineError("vLLM could not empty its prefix cache, which older weights computed", "see its log")
        if self.asleep:
            await self._control("/wake_up?tags=kv_cache", "wake")
        if self._paused or self.asleep:
            await self._control("/resume", "wake")
        self._paused = self.asleep = False

    # what it computes

    async def logprobs(self, row: Sequence[int]) -> list[float]:
        """Log-probability of every token but the first of a row, at temperature 1."""
        body = {
            "model": self.info.model,
            "prompt": list(row),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "return_token_ids": True,
        }
        answer = orjson.loads(await self._server.post(PATH, orjson.dumps(body)))
        found = answer["choices"][0].get("prompt_logprobs")
        if not found or len(found) != len(row):
            raise EngineError("vLLM sent no log-probabilities of a prompt's tokens", "use a version of the extra `gpu`")
        return [each[str(token)]["logprob"] for each, token in zip(found[1:], row[1:], strict=True)]

    # its health

    async def _control(self, path: str, doing: str, body: dict[str, Any] | None = None) -> bytes:
        """One order. Raises EngineError: OutOfMemory, how the process ended, or its own words."""
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                return await self._server.post(path, orjson.dumps(body) if body is not None else b"")
        except TimeoutError:
            await self.server.child.kill(f"the {NAME} did not answer {path} within {CONTROL_TIMEOUT_S:g} s")
            raise self.server.exited.result().error() from None
        except Unreachable as error:
            await self._mourn(error)
        except EngineError as error:
            if is_out_of_memory(error.message):
                doing = doing if doing in MENDS else "wake"
                raise out_of_memory(f"the {NAME} ({path})", doing, error.message, self.owners) from None
            raise EngineError(f"{path}: {error.message}", f"see {self.server.log_name}") from None

    async def _mourn(self, error: Unreachable) -> NoReturn:
        """It does not answer any more: say how it ended. One that has not ended is of no use either."""
        await asyncio.wait({self.server.exited}, timeout=3)
        await self.server.child.kill(error.message)
        raise self.server.exited.result().error() from None

    async def _watch_stall(self) -> None:
        """End a server whose engine hangs while its front answers. An agent that does not read its reply holds up
        nobody but itself: what waits for it does not wait for the server.

        Only a token is a sign of life: agents give up before STALL_S, others ask after them, and an update begins,
        which waits as they did.
        """
        sampled = self._counter.sampled
        while not self.server.child.ended:
            await asyncio.sleep(1)
            if self._paused or self._counter.sampled != sampled:
                sampled, self.waited_s = self._counter.sampled, 0
            elif self._pausing or any(events.waits for events in self._streams):
                self.waited_s += 1
            if self.waited_s >= STALL_S:
                await self.server.child.kill(f"the {NAME} gave no token for {STALL_S:g} s")
