"""Recipes that come with aglite: beside the package in a clone, inside of it where it was installed from a wheel."""

from __future__ import annotations

from pathlib import Path

INSIDE = Path(__file__).parent / "recipes"
CLONE = Path(__file__).parent.parent


def folder() -> Path | None:
    """Where the shipped recipes are; None where somebody left them out."""
    if INSIDE.is_dir():
        return INSIDE
    beside = CLONE / "recipes"  # of a clone only: in site-packages, `recipes` would be somebody else's
    return beside if beside.is_dir() and (CLONE / "pyproject.toml").is_file() else None


def find(name: Path) -> Path | None:
    """What `NAME`, `NAME/VARIANT.yaml`, or either of them after `recipes/`, means of the shipped recipes: a folder or a
    file."""
    root = folder()
    parts = name.parts[1:] if name.parts[:1] == ("recipes",) else name.parts
    if root is None or name.is_absolute() or ".." in parts or not 1 <= len(parts) <= 2:
        return None
    found = root.joinpath(*parts)
    if len(parts) == 2:
        return found if found.suffix == ".yaml" and found.is_file() else None
    return found if (found / "recipe.yaml").is_file() else None


def offered() -> list[tuple[str, str]]:
    """What `aglite up` can be given, and in a line what it is: recipes under ./recipes, then shipped ones that are not
    among them."""
    here = [path.parent for path in sorted(Path("recipes").glob("*/recipe.yaml"))]
    root = folder()
    shipped = [path.parent for path in sorted(root.glob("*/recipe.yaml"))] if root else []
    known = {path.resolve() for path in here}
    rows = [(str(path), about(path)) for path in here]
    return rows + [(path.name, about(path)) for path in shipped if path.resolve() not in known]


def about(recipe: Path) -> str:
    """What a recipe is, in a line: the title of its README without the name, or its file's first comment."""
    try:
        readme = (recipe / "README.md").read_text(encoding="utf-8", errors="replace").strip()
        title = readme.partition("\n")[0]
        if title.startswith("# "):
            return title.removeprefix("# ").removeprefix(f"{recipe.name}:").strip()
    except OSError:
        pass  # it has none
    try:
        first = (recipe / "recipe.yaml").read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return ""
    return first.removeprefix("#").strip() if first.startswith("#") else ""
