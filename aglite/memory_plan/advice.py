"""What to change so that a recipe fits a card: each change tried by planning anew, the smallest that are enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from aglite.config import Recipe
from aglite.errors import RecipeError
from aglite.memory_plan.plan import Plan, sleep_level
from aglite.memory_plan.shape import Shape

MOST = 4
"""Changes that one piece of advice may have."""
SHOWN = 3
"""Pieces of advice that are given."""

Planner = Callable[[Recipe], Plan]


@dataclass(frozen=True, slots=True)
class Change:
    """A setting to change, as `--set` takes it."""

    key: str
    value: object

    def __str__(self) -> str:
        value = self.value
        if isinstance(value, bool):
            return f"{self.key}={str(value).lower()}"
        if isinstance(value, dict):
            return f"{self.key}={{{', '.join(f'{name}: {one}' for name, one in value.items())}}}"
        return f"{self.key}={value}"


def advice(recipe: Recipe, shape: Shape, planned: Planner) -> list[tuple[Change, ...]]:
    """Up to SHOWN sets of as few changes as make the recipe fit, those that cost least first; [] if none does.

    `planned` plans a changed recipe for the card in question.
    """
    candidates = list(_candidates(recipe, shape, planned(recipe)))
    for count in range(1, MOST + 1):
        found: dict[frozenset[str], tuple[Change, ...]] = {}
        for changes in combinations(candidates, count):
            keys = frozenset(change.key for change in changes)
            if len(keys) < count or keys in found:  # of one setting, the mildest change is enough
                continue
            changed = _changed(recipe, changes)
            if changed is not None and planned(changed).fits:
                found[keys] = changes
                if len(found) == SHOWN:
                    break
        if found:
            return list(found.values())
    return []


def _candidates(recipe: Recipe, shape: Shape, plan: Plan) -> Iterator[Change]:
    """Changes that may help, those that change a run least first."""
    trainer, engine = recipe.trainer, recipe.engine
    if not trainer.gradient_checkpointing:
        yield Change("trainer.gradient_checkpointing", True)
    if not trainer.offload_optimizer:
        yield Change("trainer.offload_optimizer", True)
    for part in (2, 4, 8):
        if trainer.tokens_per_micro_batch // part >= 512:
            yield Change("trainer.tokens_per_micro_batch", trainer.tokens_per_micro_batch // part)
    if engine.own_vllm:
        if plan.phases[0].total > plan.usable or plan.rollouts < 1:
            for percent in (95, 90, 85, 80, 75, 70, 65, 60, 55, 50, 40, 30):
                yield Change("engine.gpu_memory_utilization", percent / 100)
        if sleep_level(recipe) == 1:
            yield Change("engine.sleep_level", 2)
        if not engine.enforce_eager:
            yield Change("engine.enforce_eager", True)
    else:
        for part in (2, 4):
            yield Change("engine.kv_tokens", engine.kv_tokens // part)
    if plan.context_length > shape.positions:
        yield Change("engine.context_length", shape.positions)
    for part in (2, 4, 8):
        if plan.context_length // part >= 1024:
            yield Change("engine.context_length", plan.context_length // part)
    if not trainer.lora:
        yield Change("trainer.lora", {"rank": 16, "alpha": 32})
    elif not plan.trained:
        yield Change("trainer.lora", {"rank": trainer.lora.rank, "alpha": trainer.lora.alpha})


def _changed(recipe: Recipe, changes: tuple[Change, ...]) -> Recipe | None:
    """A recipe with other settings; None where they contradict the rest of it."""
    data = recipe.model_dump()
    for change in changes:
        section, _, key = change.key.partition(".")
        data[section][key] = change.value
    try:
        return Recipe(**data, folder=recipe.folder)
    except (ValueError, RecipeError):
        return None
