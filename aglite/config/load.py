"""Reading a recipe: its file, what the command line overrides in it, and why one cannot be used."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from aglite import shipped
from aglite.config.recipe import Recipe
from aglite.errors import RecipeError
from aglite.recipe_file import read_mapping


def find_recipe(path: str | Path) -> Path:
    """The recipe.yaml that `path` names: a folder, a file, or a recipe that comes with aglite (`NAME`)."""
    path = Path(path)
    if not path.exists():
        path = shipped.find(path) or path
    file = path / "recipe.yaml" if path.is_dir() else path
    if not file.is_file():
        raise RecipeError(
            f"no recipe at {path}",
            "give a folder with a recipe.yaml; `aglite up` alone lists recipes, `aglite init` writes one",
        )
    return file


def load_recipe(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Read a recipe and apply `key.path=value` overrides (values are YAML). Raises RecipeError."""
    file = find_recipe(path)
    data = read_mapping(file)
    for override in overrides:
        _apply(data, override)
    return parse_recipe(data, file)


def parse_recipe(data: dict[str, Any], file: Path) -> Recipe:
    """Validate plain data as the recipe that was read from `file`."""
    try:
        recipe = Recipe(**{**data, "folder": file.parent})
    except ValidationError as error:
        lines = [_explain(problem, data) for problem in error.errors()]
        raise RecipeError(f"{file} cannot be used:\n  " + "\n  ".join(lines), "correct the fields named") from None
    beside = recipe.folder / recipe.model
    if beside.is_dir():
        recipe.model = str(beside)
    return recipe


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise RecipeError(f"--set {override}: not of the form key.path=value", "for example --set trainer.steps=3")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {override}: the value is not valid YAML ({error})", "quote it") from None
    if isinstance(value, str) and value == text.strip():  # what is quoted is meant as text
        value = _number(value)
    here = data
    for part in parts[:-1]:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise RecipeError(f"--set {override}: {part} is not a section", "use the recipe's own field names")
    here[parts[-1]] = value


def _number(text: str) -> str | float:
    """YAML 1.1 reads `5e-5` as text; people mean the number."""
    try:
        return float(text)
    except ValueError:
        return text


def _explain(problem: Any, data: dict[str, Any]) -> str:
    path = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = _siblings(problem["loc"])
        close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        advice = f"did you mean {close[0]}?" if close else f"known here: {', '.join(known)}"
        return f"{path}: unknown key (value {problem['input']!r}); {advice}"
    if problem["type"] == "missing":
        return f"{path}: missing"
    if problem["type"] in ("model_type", "dict_type"):
        return f"{path}: a section with keys of its own is wanted (it is {problem['input']!r})"
    if problem["type"] == "string_type" and isinstance(value := problem["input"], int | float):
        text = str(value).lower() if isinstance(value, bool) else value
        return f'{path}: text is wanted, and {text} alone is none; quote it: "{text}" (--set \'{path}="{text}"\')'
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{path}: {message} (it is {problem['input']!r})" if path else message


def _siblings(loc: tuple[Any, ...]) -> list[str]:
    model: Any = Recipe
    for part in loc[:-1]:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is None:
            return []
        model = _section_of(field.annotation)
    return [name for name in getattr(model, "model_fields", {}) if name != "folder"]


def _section_of(annotation: Any) -> Any:
    options = getattr(annotation, "__args__", None) or (annotation,)
    return next((option for option in options if hasattr(option, "model_fields")), None)
