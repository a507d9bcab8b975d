"""Brings README.md up to date with what it quotes: `python docs/update_readme.py`.

A code block after `<!-- all of FILE -->` or `<!-- head of FILE -->` holds that file (or its first two lines), the
table of commands what the command line says of itself. A test fails while the README and its sources differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
QUOTE = re.compile(r"(<!-- (all|head) of (\S+) -->\n```\w*\n).*?(?=```)", re.DOTALL)
TABLE = re.compile(r"(\| command \| what it does \|\n\| --- \| --- \|\n).*?(?=\n\n)", re.DOTALL)


def updated(text: str) -> str:
    """The README's text with its quotations and its table of commands as they should be."""

    def quote(match: re.Match[str]) -> str:
        lines = (ROOT / match[3]).read_text().splitlines(keepends=True)
        return match[1] + "".join(lines if match[2] == "all" else lines[:2])

    rows = "\n".join(f"| `{name}` | {what} |" for name, what in commands())
    return TABLE.sub(lambda match: match[1] + rows, QUOTE.sub(quote, text))


def commands() -> Iterator[tuple[str, str]]:
    """Every command of aglite with the first line of its help."""
    import typer.main

    from aglite.cli.app import app

    def walk(group: Any, prefix: str) -> Iterator[tuple[str, str]]:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from walk(command, f"{prefix} {name}")
            elif not command.hidden:
                yield f"{prefix} {name}", (command.help or "").strip().splitlines()[0]

    yield from walk(typer.main.get_command(app), "aglite")


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text()))
