"""Reading a recipe's YAML as plain data, with the mistakes that YAML itself lets pass refused."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from aglite.errors import RecipeError


def read_mapping(file: Path) -> dict[str, Any]:
    """The sections of a YAML file. Raises RecipeError: not readable, not YAML, no mapping, a key that stands twice (of
    which YAML would silently take the last) or that is no text."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file} cannot be read: {error}", "a recipe is a text file in UTF-8") from None
    try:
        data = yaml.load(text, _Strict)
    except yaml.YAMLError as error:
        raise RecipeError(f"{file} is not valid YAML: {error}", "correct the line it names") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{file} holds no mapping", "`aglite init FOLDER` writes one to start from")
    return data


class _Strict(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue  # what `<<` brings in may be overridden
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} is no text", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"{key} stands here twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)
