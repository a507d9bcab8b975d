"""The training side of the worker: verl's engine and losses, driven one micro-batch at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from aglite.errors import AgliteError, EngineError
from aglite.worker import checkpoint, verl_cpu
from aglite.worker.packing import build_forest, plan_forests

verl_cpu.install()  # before any other module of verl

from transformers.utils import logging as transformers_logging  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402
from verl.workers.config import (  # noqa: E402
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers_tinker import TinkerTrainingWorker  # noqa: E402

from aglite.worker.batch import Row, micro_batch, padded, read_rows  # noqa: E402
from aglite.worker.loss import PolicyLoss, Tally  # noqa: E402

Plan = list[list[int]]
"""Row numbers of each micro-batch of one optimizer update."""


class Trainer:
    """Policy (and, with `kl`, reference) model of one run, on the CPU in fp32.

    `lr` is the optimizer's initial value only: every step names its own. `tokens_per_micro_batch` bounds the tokens of
    one forward and backward pass, where a prefix that several rows share counts once. `progress("train", done=, of=)`
    is called after each micro-batch.
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
        seed: int = 0,
        progress: Callable[..., None] = lambda kind, **data: None,
    ) -> None:
        torch.manual_seed(seed)
        self._model_dir = model_dir
        self._budget = tokens_per_micro_batch
        self._progress = progress
        transformers_logging.disable_progress_bar()
        optimizer = FSDPOptimizerConfig(
            lr=lr,
            betas=(betas[0], betas[1]),
            weight_decay=weight_decay,
            clip_grad=grad_clip,
            lr_warmup_steps=0,
            total_training_steps=1,
            override_optimizer_config={"fused": True},
        )
        self._worker = _verl_worker(model_dir, optimizer)
        self._reference = _verl_worker(model_dir, optimizer) if kl > 0 else None

    @property
    def module(self) -> torch.nn.Module:
        return self._worker.engine.module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._worker.engine.optimizer

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The live parameters under their Hugging Face names; tied ones once."""
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()

    # one step

    def train(self, batch: dict[str, Any], engine_logprobs: dict[int, list[float]] | None = None) -> dict[str, Any]:
        """One step: an optimizer update for each mini-batch of `batch["plan"]`.

        The plan's micro-batches say which rows make up a mini-batch; how those are split is decided here, by common
        prefixes. The gradient is a sum over tokens, so the split changes nothing. `engine_logprobs` holds for some row
        numbers what the engine gives every token but the first under the current weights; for trained tokens it is
        compared with the trainer's. An update whose loss or gradient is not finite is not applied, and counted in
        `skipped`.
        """
        started = time.monotonic()
        rows, temperature = read_rows(batch), float(batch["temperature"])
        plans = [self._plan([index for micro in mini for index in micro], rows) for mini in batch["plan"]]
        tally = Tally()
        start = self._of_rows(self._worker, plans, rows, temperature) if len(plans) > 1 else None
        reference = self._of_rows(self._reference_worker(), plans, rows, temperature) if batch["kl"] > 0 else None
        self._worker.set_loss_fn(PolicyLoss(batch, tally))
        micro_batches, done, updates = sum(map(len, plans)), 0, []
        for plan in plans:
            self._worker.optimizer_zero_grad()
            loss = 0.0
            for part in plan:
                loss += self._forward_backward(part, rows, temperature, start, reference, engine_logprobs or {})
                done += 1
                self._progress("train", done=done, of=micro_batches)
            updates.append((loss, self._optimizer_step(loss, float(batch["lr"]))))
        applied = sum(math.isfinite(norm) for _, norm in updates)
        return {
            "loss": sum(loss for loss, _ in updates) / len(updates),
            "grad_norm": sum(norm for _, norm in updates) / len(updates),
            **tally.metrics(with_reference=reference is not None),
            "tokens": sum(len(row.ids) for row in rows),
            "trained_tokens": sum(sum(row.mask) for row in rows),
            "computed_tokens": sum(
                len(build_forest([rows[i].ids for i in part]).ids) for plan in plans for part in plan
            ),
            "micro_batches": micro_batches,
            "seconds": time.monotonic() - started,
            "applied": applied > 0,
            "updates": applied,
            "skipped": len(updates) - applied,
        }

    def _plan(self, members: list[int], rows: list[Row]) -> Plan:
        parts = plan_forests([rows[index].ids for index in members], self._budget)
        return [[members[place] for place in part] for part in parts]

    def _forward_backward(
        self,
        part: list[int],
        rows: list[Row],
        temperature: float,
        start: dict[int, list[float]] | None,
        reference: dict[int, list[float]] | None,
        engine: dict[int, list[float]],
    ) -> float:
        """Add the gradient of one micro-batch; returns its loss."""
        members = [rows[index] for index in part]
        weights = padded([[row.weight] * len(row.ids) for row in members])
        data = micro_batch(
            members,
            rollout_log_probs=padded([row.logprobs for row in members]),
            advantages=weights * torch.tensor([[row.advantage] for row in members], dtype=torch.float32),
            weights=weights,
            engine_log_probs=padded([[0.0, *engine.get(index, rows[index].expected())] for index in part]),
        )
        if start is not None:
            data["old_log_probs"] = padded([[0.0, *start[index]] for index in part])
        if reference is not None:
            data["ref_log_prob"] = padded([[0.0, *reference[index]] for index in part])
        _how(data, temperature, calculate_entropy=True)
        return tu.get(self._worker.forward_backward(data), "metrics")["loss"]

    def _optimizer_step(self, loss: float, lr: float) -> float:
        """Apply the gradient; returns its norm before clipping, not finite if nothing was applied."""
        if not math.isfinite(loss):
            self._worker.optimizer_zero_grad()
            return math.nan
        # verl itself leaves the weights alone when the norm is not finite
        return self._worker.optimizer_step({"lr": lr})["grad_norm"]

    def _reference_worker(self) -> TinkerTrainingWorker:
        if self._reference is None:
            raise EngineError("this trainer holds no reference model", "start it with kl > 0")
        return self._reference

    # log-probabilities

    def logprobs(self, rows: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """Log-probability of every token but the first of each row, at `temperature`."""
        whole = [Row(list(ids), bytes([0] + [1] * (len(ids) - 1)), [], b"", 0.0, 0.0) for ids in rows]
        found = self._of_rows(self._worker, [plan_forests(rows, self._budget)], whole, temperature)
        return [found[index] for index in range(len(rows))]

    def _of_rows(
        self, worker: TinkerTrainingWorker, plans: list[Plan], rows: list[Row], temperature: float
    ) -> dict[int, list[float]]:
        """Log-probabilities by row number: of every token but the first, 0 where the row's mask is."""
        found = {}
        for part in (part for plan in plans for part in plan):
            data = micro_batch([rows[index] for index in part])
            _how(data, temperature, compute_loss=False)
            for index, values in zip(part, worker.infer_batch(data)["log_probs"].unbind(), strict=True):
                found[index] = values[:-1].tolist()
        return found

    # checkpoints

    def save(self, path: Path, meta: dict[str, Any]) -> None:
        """Write a checkpoint folder; see `checkpoint.save`."""
        checkpoint.save(path, self._model_dir, self.weights(), self.optimizer.state_dict(), meta)

    def load(self, path: Path) -> dict[str, Any]:
        """Take weights, optimizer and random state from a checkpoint; returns its meta."""
        state = checkpoint.load(path)
        weights = dict(self.weights())
        if weights.keys() != state.weights.keys():
            odd = sorted(weights.keys() ^ state.weights.keys())
            raise AgliteError(f"{path} is a checkpoint of another model (differs in {odd[0]})", "use its own recipe")
        with torch.no_grad():
            for name, tensor in state.weights.items():
                weights[name].copy_(tensor)
        self.optimizer.load_state_dict(state.optimizer)
        torch.set_rng_state(state.rng)
        return state.meta

    def export(self, path: Path) -> None:
        """Write the weights as a Hugging Face folder."""
        checkpoint.export(path, self._model_dir, self.weights())


def _how(data: Any, temperature: float, **options: Any) -> None:
    """Tell verl how to run `data`: whole, as one micro-batch."""
    rows = data.batch_size[0]
    tu.assign_non_tensor(
        data,
        temperature=temperature,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=rows,
        global_batch_size=rows,
        **options,
    )


def _verl_worker(model_dir: Path, optimizer: FSDPOptimizerConfig) -> TinkerTrainingWorker:
    model = HFModelConfig(
        path=str(model_dir),
        load_tokenizer=False,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    if "sliding_attention" in (getattr(model.hf_config, "layer_types", None) or ()):
        raise AgliteError(
            f"{model_dir} has sliding-window attention, which training on the CPU does not know",
            "use a model with full attention, such as smollm2-135m",
        )
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = FSDPEngineConfig(
        strategy="fsdp2", use_torch_compile=False, use_dynamic_bsz=False, model_dtype="fp32", mixed_precision=fp32
    )
    worker = TinkerTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker
