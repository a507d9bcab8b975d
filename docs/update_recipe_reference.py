"""Brings docs/recipe.md up to date with the schema in aglite/config/: `python docs/update_recipe_reference.py`.

Everything between the two marks is made from the schema: a table for each section, and the keys that may change when a
run goes on. A test fails while the page and the schema differ, and where a key has no explanation.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from aglite.config import RESUMABLE, Recipe

PAGE = Path(__file__).resolve().parent / "recipe.md"
BEGIN = "<!-- made from aglite/config/ by docs/update_recipe_reference.py -->\n"
END = "<!-- end of what is made -->"
SIGNS = ((Ge, "ge", "at least"), (Gt, "gt", "above"), (Le, "le", "at most"), (Lt, "lt", "below"))
TYPES = {str: "text", int: "integer", float: "number", bool: "true or false"}


def updated(text: str) -> str:
    """The page's text with the reference as the schema has it."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + reference() + END + rest.partition(END)[2]


def reference() -> str:
    parts = [_table("", Recipe), *(_table(path, model) for path, model in sections(Recipe))]
    keys = ", ".join(f"`{key}`" for key in RESUMABLE)
    parts.append(f"### What may change when a run goes on\n\n{keys}; of a section, every key in it.\n")
    return "\n".join(parts) + "\n"


def sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section of the recipe with its path, in the order of the schema."""
    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is not None:
            yield f"{prefix}{name}", section
            yield from sections(section, f"{prefix}{name}.")


def keys(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """The keys of one section that are no sections themselves."""
    for name, field in model.model_fields.items():
        if section_of(field) is None and not field.exclude:
            yield name, field


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    options = typing.get_args(field.annotation) or (field.annotation,)
    return next((one for one in options if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _table(path: str, model: type[BaseModel]) -> str:
    rows = [
        f"| `{name}` | {_kind(field)} | {_default(field)} | {' '.join((field.description or '').split())} |"
        for name, field in keys(model)
    ]
    if not rows:
        return ""
    title = f"### {path}" if path else "### At the top"
    head = "| key | value | default | meaning |\n| --- | --- | --- | --- |\n"
    return f"{title}\n\n{head}" + "\n".join(rows) + "\n"


def _kind(field: FieldInfo) -> str:
    bounds = []
    for rule in [*field.metadata, *_inner_rules(field.annotation)]:
        bounds += [f"{words} {getattr(rule, name)}" for kind, name, words in SIGNS if isinstance(rule, kind)]
    return ", ".join([_words(field.annotation), *bounds])


def _inner_rules(annotation: Any) -> list[Any]:
    """The bounds inside `Annotated[int, ...] | None`."""
    return [rule for one in typing.get_args(annotation) for rule in getattr(one, "__metadata__", ())] + [
        rule
        for one in typing.get_args(annotation)
        for info in getattr(one, "__metadata__", ())
        for rule in getattr(info, "metadata", ())
    ]


def _words(annotation: Any) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin is list:
        return f"list of {_words(inner[0])}"
    if origin is tuple:
        return f"list of {len(inner)} numbers"
    if origin is dict:
        return "mapping of text to text"
    if origin is typing.Annotated:
        return _words(inner[0])
    options = [one for one in inner if one is not type(None)]
    return _words(options[0]) if options else TYPES[annotation]


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "–" if field.default is None else f"`{json.dumps(field.default)}`"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
