"""The GPU that a run would use, and whether the run fits it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aglite.builtin_models import BUILTIN, is_cached
from aglite.config import Recipe
from aglite.errors import AgliteError
from aglite.host_memory import total_bytes
from aglite.memory_plan.advice import advice
from aglite.memory_plan.plan import GIB, Plan, make_plan
from aglite.memory_plan.shape import Shape, read_shape
from aglite.memory_plan.table import advice_lines, table
from aglite.model_folder import ModelError
from aglite.models import resolve_model
from aglite.units import gib

SETTLE_S = 20.0
"""How long the memory of programs that have just been ended may take to come back."""
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    total: int
    """Bytes."""
    used: int = 0
    """Bytes that programs hold now."""


def present_card(nvml: Any = None) -> Card | None:
    """The first GPU that programs started now would see; None without one, or without a driver that answers."""
    if nvml is None:
        import pynvml as nvml
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if visible in ("", "-1"):
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        by_number = visible.isdigit()
        handle = (nvml.nvmlDeviceGetHandleByIndex if by_number else nvml.nvmlDeviceGetHandleByUUID)(
            int(visible) if by_number else visible
        )
        name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
        return Card(name.decode() if isinstance(name, bytes) else name, memory.total, memory.used)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def uses_gpu(recipe: Recipe) -> bool:
    """Whether a run of it would compute on a GPU where there is one."""
    return recipe.engine.own_vllm or (recipe.engine.kind == "embedded" and recipe.trainer.device != "cpu")


def shape_of(model: str) -> Shape:
    """The sizes of a recipe's model, from its configuration alone: no weights are fetched. Raises ModelError."""
    if model in BUILTIN and not is_cached(model):
        raise ModelError(
            f"model {model} has not been fetched, so its sizes are not known", f"aglite model fetch {model}"
        )
    return shape_in(resolve_model(model, weights=False))


def shape_in(folder: Path) -> Shape:
    return read_shape(json.loads((folder / "config.json").read_text()))


def refuse_what_does_not_fit(
    recipe: Recipe, model_dir: Path, on_line: Callable[[str], None], *, nvml: Any = None
) -> None:
    """Before anything is loaded: raise AgliteError with the table and the changes that help where the recipe does not
    fit the GPU that is there. Where there is none, or the model's sizes are not known, that is only said.

    Where it would fit were it not for other programs, they are given SETTLE_S to end: a run that starts again comes
    right after processes of its own, whose memory the driver takes a while to free.
    """
    card = present_card(nvml)
    if card is None:
        return
    try:
        shape = shape_in(model_dir)
    except ModelError as error:
        on_line(f"no memory plan: {error.message}")
        return
    plan, deadline = planned_for(recipe, shape, card), time.monotonic() + SETTLE_S
    alone = planned_for(recipe, shape, replace(card, used=0)).fits
    if alone and not plan.fits:
        on_line(f"waiting for other programs to free memory of {card.name}: they hold {gib(card.used)}")
    while alone and not plan.fits and time.monotonic() < deadline:
        time.sleep(POLL_S)
        card = present_card(nvml) or card
        plan = planned_for(recipe, shape, card)
    if not plan.fits:
        raise AgliteError("\n".join(table(plan, card.name)), helps(recipe, shape, card))
    on_line(
        f"memory plan: {plan.peak.total / GIB:.1f} of {plan.usable / GIB:.1f} GiB at most ({plan.peak.name}), "
        f"KV cache of {plan.kv_tokens:,} tokens; `aglite doctor RECIPE` shows all of it"
    )


def planned_for(recipe: Recipe, shape: Shape, card: Card, *, here: bool = True) -> Plan:
    """`here`: on this machine, whose memory has to hold what is moved there."""
    return make_plan(recipe, shape, card.total, others=card.used, host_memory=total_bytes() if here else 0)


def helps(recipe: Recipe, shape: Shape, card: Card, *, here: bool = True) -> str:
    """The smallest changes that make the recipe fit, in a sentence."""
    return advice_lines(advice(recipe, shape, lambda changed: planned_for(changed, shape, card, here=here)))
