"""The training side of the worker: verl's engine and losses, driven one micro-batch at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aglite.errors import AgliteError, EngineError
from aglite.worker import checkpoint, ranks, verl_world
from aglite.worker.packing import build_forest, plan_rows, row_by_row
from aglite.worker.sharding import abandon, like, load_optimizer_state, optimizer_state, settle, whole

verl_world.install()  # before any other module of verl; on what there is, unless somebody has said where

from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.utils.device import get_device_name, get_torch_device  # noqa: E402
from verl.workers.config import FSDPOptimizerConfig  # noqa: E402

from aglite.worker import gpu_memory, memory  # noqa: E402
from aglite.worker import lora as adapters  # noqa: E402
from aglite.worker.batch import Row, loss_batch, micro_batch, read_rows  # noqa: E402
from aglite.worker.loss import PolicyLoss, Tally  # noqa: E402
from aglite.worker.off_policy import OffPolicy, sequence_log_ratios  # noqa: E402
from aglite.worker.verl_worker import Setup, TinkerTrainingWorker, verl_worker  # noqa: E402

Plan = list[list[int]]
"""Row numbers of each micro-batch of one optimizer update."""


class Trainer:
    """Policy (and, with `kl`, reference) model of one run, on the device that `verl_world.install` was told.

    `lr` is the optimizer's initial value only: every step names its own. `tokens_per_micro_batch` bounds the tokens of
    one forward and backward pass, where a prefix that several rows share counts once if the layout shares it.
    `progress("train", done=, of=)` is called after each micro-batch. The other settings are the recipe's.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        lr: float = 1e-5,
        betas: Sequence[float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        grad_clip: float = 1.0,
        kl: float = 0.0,
        tokens_per_micro_batch: int = 1024,
        dtype: str = "auto",
        attention: str = "auto",
        gradient_checkpointing: bool = False,
        offload_optimizer: bool = False,
        lora: dict[str, Any] | None = None,
        seed: int = 0,
        progress: Callable[..., None] = lambda kind, **data: None,
    ) -> None:
        torch.manual_seed(seed)
        self._model_dir = model_dir
        self._budget = tokens_per_micro_batch
        self._progress = progress
        self._setup = setup = Setup.of(
            dtype=dtype,
            attention=attention,
            gradient_checkpointing=gradient_checkpointing,
            offload_optimizer=offload_optimizer,
            lora=lora,
        )
        optimizer = FSDPOptimizerConfig(
            lr=lr,
            betas=(betas[0], betas[1]),
            weight_decay=weight_decay,
            clip_grad=grad_clip,
            lr_warmup_steps=0,
            total_training_steps=1,
            override_optimizer_config={"fused": True},
        )
        self._worker = verl_worker(model_dir, optimizer, setup)
        self._layout = self._worker.engine.layout
        self._reference: TinkerTrainingWorker | None = None
        if kl > 0:  # the weights without their adapter are those of the start
            self._reference = self._worker if lora else verl_worker(model_dir, optimizer, setup, reference=True)
        self._room: memory.Room | None = None
        self._phases = gpu_memory.Phases()
        self.onloaded = True
        """Whether weights and optimizer are where they can be trained."""

    @property
    def module(self) -> torch.nn.Module:
        return self._worker.engine.module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._worker.engine.optimizer

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters under their Hugging Face names, tied ones once, wherever they are: the live ones on one
        device; with an adapter, copies with its product added."""
        if self._setup.lora:
            yield from adapters.merged(self.module)
        else:
            for name, parameter in self.module.named_parameters():
                yield name, whole(parameter.detach())

    # where it is

    def onload(self) -> None:
        """Bring weights, gradients and optimizer state to the device. Raises AgliteError if it has no room for them.
        On the CPU it is only noted."""
        self._phases.enter("onload", "weights and optimizer state were brought to it")
        try:
            self._move(get_device_name())
        except torch.OutOfMemoryError:
            refusal = self._refusal()
        else:
            self.onloaded = True
            return
        self._move("cpu")
        raise refusal

    def offload(self) -> None:
        """Bring all of it to host memory and leave the device to others. On the CPU it is only noted."""
        self._move("cpu")
        self.onloaded = False

    def _move(self, where: str) -> None:
        if get_device_name() == "cpu":
            return
        stays = where != "cpu" and self._setup.offload_optimizer
        self._worker.engine.to(where, model=True, optimizer=not stays, grad=True)
        get_torch_device().synchronize()  # verl copies without waiting
        get_torch_device().empty_cache()

    def _ready(self) -> None:
        if not self.onloaded:
            raise EngineError("the trainer's weights are in host memory", "call onload before it is to compute")

    # one step

    def train(self, batch: dict[str, Any], engine_logprobs: dict[int, list[float]] | None = None) -> dict[str, Any]:
        """One step: an optimizer update for each mini-batch of `batch["plan"]`.

        The plan's micro-batches say which rows make up a mini-batch; how those are split is decided here, by common
        prefixes. The gradient is a sum over tokens, so the split changes nothing. `engine_logprobs` holds for some row
        numbers what the engine gives every token but the first under the current weights; for trained tokens it is
        compared with the trainer's. An update whose loss or gradient is not finite is not applied, and counted in
        `skipped`. When a GPU's memory runs out before the first update, the step begins anew with micro-batches half as
        large, which stay so; when that is of no use, AgliteError says what holds the memory.
        """
        self._ready()
        while True:
            try:
                return self._train(batch, engine_logprobs or {})
            except torch.OutOfMemoryError:
                refusal = self._refusal()
            # only here the tensors of the pass that failed are no longer held by its traceback
            for worker in filter(None, (self._worker, self._reference)):
                abandon(worker.engine.module)
            self._worker.engine.optimizer_zero_grad()
            get_torch_device().empty_cache()
            if not self._phases.divisible:
                raise refusal
            self._budget = max(1, min(self._budget, self._phases.tokens) // 2)
            print(f"{refusal.message}: trying again with {self._budget} tokens per micro-batch", flush=True)

    def _train(self, batch: dict[str, Any], engine_logprobs: dict[int, list[float]]) -> dict[str, Any]:
        started = time.monotonic()
        rows, temperature = read_rows(batch), float(batch["temperature"])
        plans = [self._plan([index for micro in mini for index in micro], rows) for mini in batch["plan"]]
        parts = [part for plan in plans for part in plan]
        sizes = [self._size([rows[index] for index in part]) for part in parts]
        largest = self._check_memory(parts, sizes, rows, batch)
        phases = self._phases
        phases.begin(sizes, many_rows=any(len(part) > 1 for part in parts), alone=ranks.count() == 1)
        tally, sequences = Tally(), OffPolicy(batch).needs_sequences
        phases.enter("start", "log-probabilities at the start of the step were computed")
        start = self._of_rows(self._worker, plans, rows, temperature) if len(plans) > 1 or sequences else None
        totals = sequence_log_ratios(rows, start) if start is not None and sequences else None
        phases.enter("reference", "log-probabilities of the reference model were computed")
        reference = self._of_reference(plans, rows, temperature) if batch["kl"] > 0 else None
        policy_loss = PolicyLoss(batch, tally)
        self._worker.set_loss_fn(policy_loss)
        done, updates = 0, []
        for plan in plans:
            self._worker.engine.optimizer_zero_grad()
            loss = 0.0
            phases.enter("train", f"a micro-batch of up to {phases.tokens} tokens was computed")
            end = done + len(plan)
            for part, counts in ranks.share(plan):
                data = loss_batch(part, rows, start, totals, reference, engine_logprobs)
                if not counts:
                    data["advantages"], data["weights"] = data["advantages"] * 0, data["weights"] * 0
                policy_loss.tally = tally if counts else Tally()
                _how(data, temperature, calculate_entropy=True, entropy_gradient=batch["entropy"] > 0)
                loss += tu.get(self._worker.forward_backward(data), "metrics")["loss"]
                done = min(done + ranks.count(), end)
                self._progress("train", done=done, of=len(parts))
            phases.enter("optimizer", "the optimizer was applied")
            phases.divisible = False  # from here on weights may have moved, and smaller passes do not help
            updates.append((loss, self._optimizer_step(loss, float(batch["lr"]))))
        applied = sum(math.isfinite(norm) for _, norm in updates)
        return {
            "loss": sum(loss for loss, _ in updates) / len(updates),
            "grad_norm": sum(norm for _, norm in updates) / len(updates),
            **Tally.of_all(ranks.gather(tally)).metrics(with_reference=reference is not None),
            "tokens": sum(len(row.ids) for row in rows),
            "trained_tokens": sum(sum(row.mask) for row in rows),
            "computed_tokens": sum(tokens for tokens, _ in sizes),
            "micro_batches": len(parts),
            "micro_batch_tokens_max": phases.tokens,
            **phases.metrics(),
            "micro_batch_mb_max": -(-max(largest, phases.pass_bytes) // 2**20),
            "seconds": time.monotonic() - started,
            "applied": applied > 0,
            "updates": applied,
            "skipped": len(updates) - applied,
        }

    def _plan(self, members: list[int], rows: list[Row]) -> Plan:
        if self._layout.alone:
            return [[index] for index in members]
        ids = [rows[index].ids for index in members]
        budget = min(self._budget, -(-sum(map(len, ids)) // ranks.count()))  # something for every rank
        parts = plan_rows(ids, budget, self._layout.shared)
        return [[members[place] for place in part] for part in parts]

    def _size(self, rows: list[Row]) -> tuple[int, int]:
        """Tokens that a micro-batch of these rows computes, and how many of them need logits."""
        ids = [row.ids for row in rows]
        forest = build_forest(ids) if self._layout.shared else row_by_row(ids)
        predicting = {
            path[at - 1] for path, row in zip(forest.paths, rows, strict=True) for at, on in enumerate(row.mask) if on
        }
        return len(forest.ids), len(predicting)

    def _check_memory(self, parts: Plan, sizes: list[tuple[int, int]], rows: list[Row], batch: dict[str, Any]) -> int:
        """Bytes that the largest micro-batch will take, where that is known before."""
        if get_device_name() != "cpu":
            return 0
        if self._room is None:
            self._room = memory.Room(self.module, self._layout, getattr(torch, self._setup.dtype))
        names = [row.get("name", f"row {index}") for index, row in enumerate(batch["rows"])]
        return self._room.check(parts, sizes, rows, names)

    def _refusal(self) -> AgliteError:
        """The error for memory that ran out. To be called before anything is freed."""
        held = gpu_memory.holders(self.module.parameters(), self.optimizer)
        return gpu_memory.out_of_memory(self._phases, held, self._setup)

    def _optimizer_step(self, loss: float, lr: float) -> float:
        """Apply the gradient; returns its norm before clipping, not finite if nothing was applied."""
        if not math.isfinite(loss):
            self._worker.engine.optimizer_zero_grad()
            return math.nan
        # verl itself leaves the weights alone when the norm is not finite
        return self._worker.optimizer_step({"lr": lr})["grad_norm"]

    # log-probabilities

    def logprobs(self, rows: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """Log-probability of every token but the first of each row, at `temperature`."""
        self._ready()
        whole_rows = [Row(list(ids), bytes([0] + [1] * (len(ids) - 1)), [], b"", b"", 0.0, 0.0, 0) for ids in rows]
        found = self._of_rows(self._worker, [self._plan(list(range(len(rows))), whole_rows)], whole_rows, temperature)
        return [found[index] for index in range(len(rows))]

    def _of_reference(self, plans: list[Plan], rows: list[Row], temperature: float) -> dict[int, list[float]]:
        if self._reference is None:
            raise EngineError("this trainer holds no reference model", "start it with kl > 0")
        return self._of_rows(self._reference, plans, rows, temperature, no_lora_adapter=bool(self._setup.lora))

    def _of_rows(
        self, worker: TinkerTrainingWorker, plans: list[Plan], rows: list[Row], temperature: float, **options: Any
    ) -> dict[int, list[float]]:
        """Log-probabilities by row number: of every token but the first, 0 where the row's mask is."""
        found = {}
        for part, _ in ranks.share([part for plan in plans for part in plan]):
            data = micro_batch([rows[index] for index in part])
            _how(data, temperature, compute_loss=False, **options)
            for index, values in zip(part, worker.infer_batch(data)["log_probs"].unbind(), strict=True):
                found[index] = values[:-1].tolist()
        settle(worker.engine.module)
        return {index: values for of_rank in ranks.gather(found) for index, values in of_rank.items()}

    # checkpoints

    def save(self, path: Path, meta: dict[str, Any]) -> None:
        """Write a checkpoint folder; see `checkpoint.save`."""
        adapter = None
        if self._setup.lora:
            tensors = {name: whole(value.detach()).cpu() for name, value in adapters.adapter(self.module).items()}
            config = self.module.peft_config["default"]
            adapter = partial(adapters.save, tensors=tensors, config=config, model_dir=self._model_dir)
        optimizer, weights = optimizer_state(self.optimizer), self._gathered()
        if ranks.first():
            checkpoint.save(path, self._model_dir, weights, optimizer, meta, adapter)

    def weight_bytes(self) -> int:
        """Size of the weights as they are."""
        return sum(one.numel() * one.element_size() for one in self.module.parameters())

    def _gathered(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The weights in host memory, for the first rank; the others only help to gather them."""
        weights = ((name, weight.cpu()) for name, weight in self.weights())
        if ranks.first():
            return weights
        for _ in weights:
            pass
        return ()

    def load(self, path: Path) -> dict[str, Any]:
        """Take weights, optimizer and random state from a checkpoint; returns its meta."""
        state = checkpoint.load(path)
        if bool(self._setup.lora) != (state.adapter is not None):
            has, wants = ("no adapter", "one") if self._setup.lora else ("an adapter", "none")
            raise AgliteError(f"{path} has {has}, and this run trains {wants}", "use its own recipe")
        mine = adapters.adapter(self.module) if self._setup.lora else dict(self.module.named_parameters())
        theirs = state.weights if state.adapter is None else state.adapter
        if mine.keys() != theirs.keys():
            odd = sorted(mine.keys() ^ theirs.keys())
            raise AgliteError(f"{path} is a checkpoint of another model (differs in {odd[0]})", "use its own recipe")
        with torch.no_grad():
            for name, tensor in theirs.items():
                mine[name].copy_(like(tensor, mine[name]))
        load_optimizer_state(self.optimizer, state.optimizer)
        torch.set_rng_state(state.rng)
        return state.meta

    def export(self, path: Path, dtype: str = "") -> None:
        """Write the weights as a Hugging Face folder, as they are or as another `dtype`. Raises DiskFullError."""
        weights = self._gathered()
        if dtype:
            weights = ((name, weight.to(getattr(torch, dtype))) for name, weight in weights)
        if ranks.first():
            checkpoint.export(path, self._model_dir, weights)


def _how(data: Any, temperature: float, **options: Any) -> None:
    """Tell verl how to run `data`: whole, as one micro-batch."""
    rows = data.batch_size[0]
    tu.assign_non_tensor(
        data,
        temperature=temperature,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=rows,
        global_batch_size=rows,
        disable_auto_offload=True,  # an optimizer in host memory is fetched when it is applied, not for every pass
        **options,
    )
