"""verl's FSDP engine on a CPU, through verl's own registries: a platform, and an engine for its device.

One rank on a CPU has nothing to shard and no accelerator to copy to, so the engine differs from its GPU parent in two
places: the module is not wrapped in FSDP (at world size 1 the wrap would copy all parameters on every pass and all
gradients after it), and a micro-batch is run as a forest of shared prefixes (`packing`) with logits only where a
trained token is predicted. What is trained is the same; a test compares it with plain torch.

`install` must run before any other verl module is imported: many of them read the device at import.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed

from aglite.worker.packing import build_forest


def _cpu_device_module() -> types.SimpleNamespace:
    """`torch.cpu` with the memory and random-state functions that verl expects of every device module."""
    names = {name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")}
    nothing = {name: lambda *_: None for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats")}
    no_bytes = {
        name: lambda *_: 0
        for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    }
    return types.SimpleNamespace(
        **names
        | nothing
        | no_bytes
        | {
            "mem_get_info": lambda *_: (1, 1),
            "get_device_name": lambda *_: "CPU",
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda state, *_: torch.set_rng_state(state),
            "manual_seed": torch.manual_seed,
            "manual_seed_all": torch.manual_seed,
        }
    )


def install() -> None:
    """Make this process a one-rank verl world on the CPU. Idempotent."""
    if torch.distributed.is_initialized():
        return
    # verl's Worker reads its place in the world from the environment; the address is never connected to
    os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    handle, rendezvous = tempfile.mkstemp(prefix="aglite-gloo-")
    os.close(handle)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    os.unlink(rendezvous)

    from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform

    @PlatformRegistry.register(platform="cpu")
    class CpuPlatform(PlatformBase):
        device_name = "cpu"
        vendor_name = "cpu"
        device_module = _cpu_device_module()

        def is_available(self) -> bool:
            return True

        def current_device(self) -> torch.device:
            return torch.device("cpu")  # verl passes it to `.to()`, where an index would mean an accelerator

        def device_count(self) -> int:
            return 1

        def set_device(self, device_index: int) -> None: ...

        def synchronize(self, device_index: int | None = None) -> None: ...

        def manual_seed(self, seed: int) -> None:
            torch.manual_seed(seed)

        def manual_seed_all(self, seed: int) -> None:
            torch.manual_seed(seed)

        def set_allocator_settings(self, settings: str) -> None: ...

        def empty_cache(self) -> None: ...

        def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
            return None, None

        def communication_backend_name(self) -> str:
            return "gloo"

        def visible_devices_envvar(self) -> str:
            return "CUDA_VISIBLE_DEVICES"

        @contextlib.contextmanager
        def nvtx_range(self, msg: str) -> Iterator[None]:
            yield

        def profiler_start(self) -> None: ...

        def profiler_stop(self) -> None: ...

        def ray_resource_name(self) -> str:
            return "CPU"

        def ray_noset_envvars(self) -> list[str]:
            return []

        def is_ipc_supported(self) -> bool:
            return False

        def cudart(self) -> None:
            return None

    set_platform(CpuPlatform())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* engine is not available")  # engines for hardware that is not here
        _register_engine()


def _register_engine() -> None:
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    @EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
    class CpuEngine(FSDPEngineWithLMHead):
        def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
            self._autocast_dtype = torch.float32  # verl then leaves autocast out
            return module

        def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            return forest_inputs(micro_batch["input_ids"], micro_batch["response_mask"], micro_batch["temperature"])

        def prepare_model_outputs(
            self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
        ) -> dict[str, torch.Tensor]:
            entropy = tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False)
            return forest_outputs(output.logits[0], output_args, micro_batch["input_ids"], entropy)


def forest_inputs(
    input_ids: torch.Tensor, response_mask: torch.Tensor, temperature: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the model gets for a micro-batch, and what `forest_outputs` needs to read its logits.

    `input_ids` is nested [rows, length of the row]; `response_mask` [rows, longest - 1] is 1 where the *next* token
    is trained.
    """
    rows = [row.tolist() for row in input_ids.unbind()]
    forest = build_forest(rows)
    size = len(forest.ids)
    mask = torch.zeros(size, size, dtype=torch.bool)
    for path, (first, end, shared) in zip(forest.paths, forest.spans, strict=True):
        mask[first:end, path] = torch.ones(end - first, len(path), dtype=torch.bool).tril(shared)
    nodes, labels, places, offset = [], [], [], 0
    for row, path, trained in zip(rows, forest.paths, response_mask.bool(), strict=True):
        for at in trained[: len(row) - 1].nonzero()[:, 0].tolist():
            nodes.append(path[at])
            labels.append(row[at + 1])
            places.append(offset + at)
        offset += len(row)
    kept, index = torch.tensor(nodes, dtype=torch.long).unique(return_inverse=True)
    inputs = {
        "input_ids": torch.tensor([forest.ids]),
        "position_ids": torch.tensor([forest.positions]),
        "attention_mask": mask[None, None],
        "logits_to_keep": kept,
    }
    outputs = {
        "temperature": float(temperature),
        "index": index,
        "labels": torch.tensor(labels, dtype=torch.long),
        "places": torch.tensor(places, dtype=torch.long),
    }
    return inputs, outputs


def forest_outputs(
    logits: torch.Tensor, args: dict[str, Any], input_ids: torch.Tensor, calculate_entropy: bool
) -> dict[str, torch.Tensor]:
    """Per-token log-probabilities (and entropy, without gradient) as verl shapes them: nested like `input_ids`, the
    value at i belongs to token i + 1, 0 where that token is not trained.

    `logits` [kept nodes, vocabulary] is scaled in place.
    """
    if args["temperature"] != 1.0:
        logits = logits.div_(args["temperature"])
    normalizer = logits.logsumexp(-1)
    log_probs = logits[args["index"], args["labels"]] - normalizer[args["index"]]
    output = {"log_probs": _nested(log_probs, args["places"], input_ids)}
    if calculate_entropy:
        with torch.no_grad():
            # H = log Z - sum p * logit
            entropy = normalizer - (logits - normalizer[:, None]).exp_().mul_(logits).sum(-1)
            output["token_entropy"] = _nested(entropy[args["index"]], args["places"], input_ids)
    return output


def _nested(values: torch.Tensor, places: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    flat = values.new_zeros(like.values().shape[0]).index_put((places,), values)
    return torch.nested.nested_tensor_from_jagged(flat, like.offsets())
