"""The trainer on several GPUs or machines: verl's own Ray worker group, a rank for each GPU.

Every rank is a Trainer of its own in a Ray actor; FSDP2 shards weights, gradients and optimizer over them. All of them
do the same calls. The ranks' devices are not this process's: it holds no weights.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from aglite.errors import AgliteError, EngineError
from aglite.worker import verl_world

DEVICE = "AGLITE_RANK_DEVICE"
"""Environment variable of the ranks: what they compute on. It is read before verl is imported."""

if DEVICE in os.environ:
    verl_world.set_platform(os.environ[DEVICE])

import ray  # noqa: E402
from verl.single_controller.base import Worker  # noqa: E402
from verl.single_controller.base.decorator import Dispatch, register  # noqa: E402
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402


class Rank(Worker):
    """One rank; lives in a Ray actor, whose environment names its place."""

    def __init__(self, model_dir: str, settings: dict[str, Any], threads: int) -> None:
        super().__init__()
        import torch

        torch.set_num_threads(threads)
        verl_world.join(os.environ[DEVICE])
        from aglite.worker.trainer import Trainer

        self._trainer = Trainer(Path(model_dir), **settings)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def host(self) -> str:
        return socket.gethostname()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._trainer, method)(*args)


class RayTrainer:
    """`n_gpus` ranks on each of `nnodes` machines. `settings`: those of Trainer.

    With several machines, Ray has to run on all of them (`ray start`), model folder and aglite have to be at the same
    place on each, and this one has to be the first by its address. Raises AgliteError where that is not so, or where
    there are not as many GPUs.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        device: str,
        n_gpus: int,
        nnodes: int = 1,
        progress: Callable[..., None] = lambda kind, **data: None,
        threads: int = 1,
        **settings: Any,
    ) -> None:
        self._progress = progress
        total = n_gpus * nnodes
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        alone: dict[str, Any] = {"num_cpus": max(total, os.cpu_count() or 1), "include_dashboard": False}
        try:
            ray.init(log_to_driver=True, **({"address": "auto"} if nnodes > 1 else alone))
        except ConnectionError as error:
            raise AgliteError(
                f"trainer.nnodes is {nnodes}, and no Ray runs here ({error})",
                "`ray start --head` on this machine, `ray start --address=...` on the others",
            ) from None
        if device == "cuda" and (there := int(ray.cluster_resources().get("GPU", 0))) < total:
            raise AgliteError(
                f"trainer.n_gpus and trainer.nnodes ask for {total} GPUs, and Ray sees {there}",
                "lower them, or add machines with `ray start`",
            )
        pool = RayResourcePool([n_gpus] * nnodes, use_gpu=device == "cuda", max_colocate_count=1)
        rank = RayClassWithInitArgs(ray.remote(Rank), str(model_dir), settings, threads)
        self._ranks = RayWorkerGroup(
            resource_pool=pool, ray_cls_with_init=rank, device_name=device, worker_env={DEVICE: device}
        )
        first = self._ranks.host()[0]
        if first != socket.gethostname():  # it writes checkpoints, and the weights that vLLM reads
            raise AgliteError(
                f"the first rank of the trainer runs on {first}, and aglite does not", f"start aglite on {first}"
            )

    def _call(self, method: str, *args: Any) -> Any:
        """What the first rank returns. Errors of ours arrive as they were raised."""
        try:
            return self._ranks.call(method, *args)[0]
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, AgliteError):
                raise error.cause from None
            raise
        except ray.exceptions.RayActorError as error:
            raise EngineError(f"a rank of the trainer has ended: {error}", "see the worker's log") from None

    def train(self, batch: dict[str, Any], engine_logprobs: dict[int, list[float]] | None = None) -> dict[str, Any]:
        """See Trainer. How far it is, is not told before its end."""
        result = self._call("train", batch, engine_logprobs)
        self._progress("train", done=result["micro_batches"], of=result["micro_batches"])
        return result

    def logprobs(self, rows: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        return self._call("logprobs", rows, temperature)

    def onload(self) -> None:
        self._call("onload")

    def offload(self) -> None:
        self._call("offload")

    def save(self, path: Path, meta: dict[str, Any]) -> None:
        self._call("save", path, meta)

    def load(self, path: Path) -> dict[str, Any]:
        return self._call("load", path)

    def export(self, path: Path, dtype: str = "") -> None:
        self._call("export", path, dtype)

    def weight_bytes(self) -> int:
        return self._call("weight_bytes")

    def weights(self) -> Iterator[tuple[str, Any]]:
        _elsewhere()


def _elsewhere() -> NoReturn:
    raise EngineError(
        "the weights are spread over several GPUs and not in this process", "use `engine.transfer: folder`"
    )
