"""The worker's compute loop: engine steps while there is something to sample, calls between two steps."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import faulthandler
import os
import queue
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aglite.errors import AgliteError, DiskFullError, EngineError
from aglite.host_memory import free_bytes
from aglite.paths import MEMORY
from aglite.worker.io import Connection, error_frame, failed_frame, pack_floats, params_of, tokens_item, unpack_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aglite.engine.base import Chunk
    from aglite.engine.embedded.engine import EmbeddedEngine
    from aglite.worker.ray_trainer import RayTrainer
    from aglite.worker.trainer import Trainer


TRAINER_SETTINGS = (
    "lr",
    "betas",
    "weight_decay",
    "grad_clip",
    "kl",
    "tokens_per_micro_batch",
    "dtype",
    "attention",
    "gradient_checkpointing",
    "offload_optimizer",
    "lora",
)
"""What the worker reads of the recipe's trainer section; the rest of it is the supervisor's."""


class Worker:
    """Serves one supervisor over one connection. All torch work happens on the thread that calls `run`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox = connection.inbox
        self._engine: EmbeddedEngine | None = None
        self._trainer: Trainer | RayTrainer | None = None
        self._model_dir: Path | None = None
        self._parcels: Iterator[dict[str, Any]] | None = None

    def run(self) -> None:
        """Serve until the socket closes (the connection then ends the process). An exception out of an engine step
        ends the worker with its traceback in the log: the state of the batch is unknown after it."""
        self._connection.start()
        self._connection.send({"op": "ready", "info": {"kind": "embedded", "pid": os.getpid()}})
        while True:
            self._handle_waiting()
            assert self._engine is not None
            chunks = self._engine.step()
            if chunks:
                self._send_chunks(chunks)

    def _handle_waiting(self) -> None:
        """Handle every frame that has arrived; wait for more while there is nothing to sample."""
        while True:
            try:
                frame = self._inbox.get(block=self._engine is None or not self._engine.has_work)
            except queue.Empty:
                return
            self._handle(frame)

    def _send_chunks(self, chunks: list[tuple[int, Chunk | EngineError]]) -> None:
        items = []
        for request_id, chunk in chunks:
            if isinstance(chunk, EngineError):
                self._connection.send(failed_frame(request_id, chunk))
            else:
                items.append(tokens_item(request_id, chunk))
        if items:
            self._connection.send({"op": "tokens", "items": items})

    def _handle(self, frame: dict[str, Any]) -> None:
        op = frame["op"]
        if op == "generate":
            self._generate(frame)
        elif op == "cancel":
            if self._engine is not None:
                self._engine.cancel(frame["id"])
        elif op == "call":
            self._call(frame)
        else:
            raise EngineError(f"unknown frame {op!r} from the supervisor", "use the same aglite on both sides")

    def _generate(self, frame: dict[str, Any]) -> None:
        try:
            self._ready_engine().submit(frame["id"], unpack_ids(frame["prompt"]), params_of(frame))
        except AgliteError as error:
            self._connection.send(failed_frame(frame["id"], error))

    def _call(self, frame: dict[str, Any]) -> None:
        method = _METHODS.get(frame["method"])
        try:
            if method is None:
                raise EngineError(f"the worker has no method {frame['method']!r}", f"it has {', '.join(_METHODS)}")
            value = method(self, **frame["args"])
        except Exception as error:  # whatever it was, the caller must hear of it
            if not isinstance(error, AgliteError):
                print(traceback.format_exc(), flush=True)
            self._connection.send(error_frame(frame["id"], error))
        else:
            self._connection.send({"op": "result", "id": frame["id"], "value": value})

    def _event(self, kind: str, **data: Any) -> None:
        self._connection.send({"op": "event", "kind": kind, "data": data})

    def _ready_engine(self) -> EmbeddedEngine:
        if self._engine is None:
            only = "only trains" if self._trainer else "has no model yet"
            raise EngineError(f"this worker {only}", "call init first, with an engine")
        return self._engine

    def _ready_trainer(self) -> Trainer | RayTrainer:
        if self._trainer is None:
            raise EngineError("this worker only samples", "start it with a trainer")
        return self._trainer

    def _folder(self) -> Path:
        assert self._model_dir is not None
        return self._model_dir

    # calls

    def init(
        self,
        model: str,
        engine: dict[str, Any] | None,
        trainer: dict[str, Any] | None = None,
        seed: int = 0,
        threads: int | None = None,
    ) -> dict | None:
        """Load the folder `model`. `engine` has context_length, max_running, kv_tokens; `trainer` the settings of
        Trainer. None for one of them: a worker that only trains, or only samples. `threads`: CPU threads."""
        if self._model_dir is not None:
            raise EngineError("the worker holds a model already", "start a new worker")
        self._model_dir = Path(model)
        if not (self._model_dir / "config.json").is_file():
            raise EngineError(f"no model in {model}: config.json is missing", "give a Hugging Face model folder")
        self._event("loading", stage="torch")
        import torch

        threads = threads or (engine or {}).get("threads") or len(os.sched_getaffinity(0))
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        from aglite.worker import verl_world

        device = verl_world.resolve_device((trainer or engine or {}).get("device", "auto"))
        if trainer is not None:
            known = {key: trainer[key] for key in TRAINER_SETTINGS if key in trainer}
            if engine is not None and known.get("dtype") == "auto":
                known["dtype"] = "float32"  # what the engine of this process computes in: the two must agree
            where = {"n_gpus": trainer.get("n_gpus", 1), "nnodes": trainer.get("nnodes", 1)}
            self._trainer = self._load_trainer(device, threads, where, seed=seed, **known)
        if engine is None:
            self._event("loading", stage="done")
            return None
        state = list(self._trainer.weights()) if self._trainer is not None else None
        self._event("loading", stage="engine")
        from aglite.engine.embedded.engine import EmbeddedEngine

        self._engine = EmbeddedEngine(
            self._model_dir,
            context_length=engine["context_length"],
            max_running=engine["max_running"],
            kv_tokens=engine["kv_tokens"],
            threads=threads,
            device=device,
            state=state,
        )
        self._event("loading", stage="done")
        return dataclasses.asdict(self._engine.info)

    def _load_trainer(self, device: str, threads: int, where: dict[str, int], **settings: Any) -> Trainer | RayTrainer:
        """One in this process, or one spread over the GPUs of `where` (n_gpus, nnodes)."""
        from aglite.worker import verl_world

        self._event("loading", stage="verl")
        if where["n_gpus"] * where["nnodes"] == 1:
            verl_world.install(device)
            from aglite.worker.trainer import Trainer

            self._event("loading", stage="trainer")
            return Trainer(self._folder(), progress=self._event, **settings)
        if device == "cpu":
            raise AgliteError(
                "trainer.n_gpus or trainer.nnodes is more than 1, and torch sees no GPU",
                "leave them out, or run `aglite doctor` if there are GPUs",
            )
        verl_world.set_platform(device)
        from aglite.worker.ray_trainer import RayTrainer

        self._event("loading", stage="trainer")
        return RayTrainer(self._folder(), device=device, threads=threads, progress=self._event, **where, **settings)

    def preempt(self) -> None:
        self._ready_engine().preempt()

    def resume(self, version: int) -> None:
        self._ready_engine().resume(version)

    def stats(self) -> dict:
        return dataclasses.asdict(self._ready_engine().stats())

    def logprobs(self, rows: list[bytes], temperature: float, source: str = "engine") -> list[bytes]:
        """Log-probability of every token but the first of each row, by the engine or by the trainer."""
        ids = [unpack_ids(row) for row in rows]
        holder = self._ready_trainer() if source == "trainer" else self._ready_engine()
        return [pack_floats(values) for values in holder.logprobs(ids, temperature)]

    def train(self, batch: dict[str, Any]) -> dict:
        """One training step; generations in flight are pre-empted and wait for `resume`."""
        trainer = self._ready_trainer()
        if self._engine is None:
            result = trainer.train(batch)
        else:
            self._engine.preempt()
            result = trainer.train(batch, self._shortest_row(batch))
            if result["applied"]:
                self._engine.load_weights(trainer.weights())
        _return_freed_memory()
        return result

    def _shortest_row(self, batch: dict[str, Any]) -> dict[int, list[float]]:
        """The engine's log-probabilities of the batch's shortest row, by its number: every step compares at least one
        row with the trainer, at the price of one short prefill."""
        ids = [unpack_ids(row["ids"]) for row in batch["rows"]]
        index = min(range(len(ids)), key=lambda i: len(ids[i]))
        return {index: self._ready_engine().logprobs([ids[index]], batch["temperature"])[0]}

    def onload(self) -> None:
        """Bring what training needs to the device."""
        self._ready_trainer().onload()

    def offload(self) -> None:
        """Leave the device to the engine."""
        self._ready_trainer().offload()
        _return_freed_memory()

    def send_weights(self, dtype: str, begin: bool) -> dict | None:
        """The next parcel of the weights in GPU memory (see `aglite.worker.parcels`), None after the last. It stays
        where it is until the next call."""
        import torch

        from aglite.worker.parcels import parcels

        if begin or self._parcels is None:
            self._parcels = parcels(self._ready_trainer().weights(), getattr(torch, dtype))
        parcel = next(self._parcels, None)
        if parcel is None:
            self._parcels = None  # and with it the buffer
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
        return parcel

    def save(self, path: str, meta: dict[str, Any]) -> None:
        """Write a checkpoint folder whole, or leave nothing of it."""
        self._ready_trainer().save(Path(path), meta)

    def load(self, path: str) -> dict:
        """Go back to a checkpoint; returns its meta."""
        trainer = self._ready_trainer()
        if self._engine is not None:
            self._engine.preempt()
        meta = trainer.load(Path(path))
        if self._engine is not None:
            self._engine.load_weights(trainer.weights())
        return meta

    def export(self, path: str, dtype: str = "") -> None:
        """Write the weights alone as a Hugging Face folder, as they are or as another `dtype`. Raises DiskFullError."""
        trainer = self._ready_trainer()
        if Path(path).is_relative_to(MEMORY):
            _check_memory(trainer)
        trainer.export(Path(path), dtype)


def _check_memory(trainer: Trainer | RayTrainer) -> None:
    """Files in memory are no use where there is none left for them. Raises DiskFullError."""
    need, free = trainer.weight_bytes(), free_bytes()
    if need > free:
        raise DiskFullError(f"the weights take {need >> 20} MB, and {free >> 20} MB of memory are left", "free memory")


def _return_freed_memory() -> None:
    """Give memory that was freed back to the system. An update frees gigabytes in pieces of all sizes; glibc keeps what
    it cannot return from the end of its heap, and the process would grow from update to update."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none, and need none
    if trim is not None:
        trim(0)


_METHODS = {
    method.__name__: method
    for method in (
        Worker.init,
        Worker.preempt,
        Worker.resume,
        Worker.stats,
        Worker.logprobs,
        Worker.train,
        Worker.onload,
        Worker.offload,
        Worker.send_weights,
        Worker.save,
        Worker.load,
        Worker.export,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m aglite.worker", description="model worker of aglite")
    parser.add_argument("--socket", required=True, help="Unix socket that the supervisor listens on")
    faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=True)  # the log is what is left when the process is killed
    # Read when torch is loaded. OpenMP threads that spin at a barrier take the core from the thread they wait for as
    # soon as an agent program runs beside them: 4 to 6 times fewer tokens a second were seen on 2 busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    Worker(Connection(parser.parse_args().socket)).run()
