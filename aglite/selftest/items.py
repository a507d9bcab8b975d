"""The items of `aglite doctor --selftest gpu`, in their order. `python -m aglite.selftest.items` runs one of them."""

from __future__ import annotations

import argparse
import importlib
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from aglite.selftest.bench import Bench, Failed, Figures, Skip


@dataclass(frozen=True, slots=True)
class Item:
    """`place` is `module:function`; the first paragraph of its documentation says what is verified."""

    name: str
    place: str
    timeout_s: int = 900

    @property
    def function(self) -> Callable[[Bench], Figures]:
        module, _, name = self.place.partition(":")
        return getattr(importlib.import_module(module), name)

    @property
    def about(self) -> str:
        return " ".join((self.function.__doc__ or "").partition("\n\n")[0].split())


ITEMS = (
    Item("cuda", "aglite.selftest.torch_items:cuda"),
    Item("embedded-engine", "aglite.selftest.torch_items:embedded_engine"),
    Item("trainer", "aglite.selftest.torch_items:trainer"),
    Item("trainer-bf16", "aglite.selftest.torch_items:trainer_bf16"),
    Item("flash-attention", "aglite.selftest.torch_items:flash_attention"),
    Item("gradient-checkpointing", "aglite.selftest.torch_items:checkpointing"),
    Item("offload", "aglite.selftest.torch_items:offload"),
    Item("offload-optimizer", "aglite.selftest.torch_items:offloaded_optimizer"),
    Item("kl-reference", "aglite.selftest.torch_items:reference"),
    Item("lora", "aglite.selftest.torch_items:lora"),
    Item("checkpoint", "aglite.selftest.torch_items:checkpoint"),
    Item("memory-plan", "aglite.selftest.torch_items:memory_plan"),
    Item("vllm-start", "aglite.selftest.vllm_items:vllm_start", 1500),
    Item("vllm-sleep", "aglite.selftest.vllm_items:vllm_sleep", 1500),
    Item("transfer-ipc", "aglite.selftest.vllm_items:transfer_ipc", 1500),
    Item("transfer-folder", "aglite.selftest.vllm_items:transfer_folder", 1500),
    Item("lora-vllm", "aglite.selftest.vllm_items:lora_vllm", 1500),
    Item("preempt", "aglite.selftest.vllm_items:preempt", 1500),
    Item("reaping", "aglite.selftest.up_items:reaping", 2400),
    Item("up", "aglite.selftest.up_items:up", 2400),
    Item("several-gpus", "aglite.selftest.up_items:several_gpus", 2400),
)
NAMED = {item.name: item for item in ITEMS}


@dataclass(slots=True)
class Outcome:
    """What came of an item. `status`: pass, fail, skip."""

    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    figures: Figures = field(default_factory=dict)


def try_item(item: Item, bench: Bench) -> Outcome:
    """Run an item in this process. Whatever goes wrong is its outcome, with the traceback in the log."""
    started = time.monotonic()
    try:
        outcome = Outcome(item.name, "pass", figures=item.function(bench))
    except Skip as reason:
        outcome = Outcome(item.name, "skip", str(reason))
    except Failed as failure:
        outcome = Outcome(item.name, "fail", str(failure))
    except Exception as error:  # every kind of failure is a finding here
        traceback.print_exc()
        outcome = Outcome(item.name, "fail", f"{type(error).__name__}: {error}".strip())
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m aglite.selftest.items")
    parser.add_argument("name")
    parser.add_argument("place")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    outcome = try_item(Item(given.name, given.place), Bench(given.model, given.scratch, given.device))
    given.out.write_text(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
