"""A recipe key by key: its value, its default, and what it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from aglite.config.recipe import Recipe


def explained(dump: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every key of a resolved recipe in the order of its sections: `{"key", "value", "default", "differs", "meaning"}`.

    `default` is null where the key has none; `differs` says that the value is not the default. Keys that this version
    does not know are left out.
    """
    return list(_rows(Recipe, dump, ""))


def _rows(section: type[BaseModel], values: Mapping[str, Any], prefix: str) -> Iterator[dict[str, Any]]:
    for name, field in section.model_fields.items():
        if field.exclude or name not in values:
            continue
        value, inner = values[name], _section(field.annotation)
        if inner is not None and isinstance(value, Mapping):
            yield from _rows(inner, value, f"{prefix}{name}.")
            continue
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            default = default.model_dump(mode="json")
        elif isinstance(default, tuple):
            default = list(default)
        yield {
            "key": f"{prefix}{name}",
            "value": value,
            "default": default,
            "differs": field.is_required() or value != default,
            "meaning": " ".join((field.description or "").split()),
        }


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, also one that may be left out."""
    for option in getattr(annotation, "__args__", None) or (annotation,):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None
