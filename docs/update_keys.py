"""Brings docs/terminal-ui.md up to date with the keys of aglite/tui/keys.py: `python docs/update_keys.py`."""

from __future__ import annotations

from pathlib import Path

from aglite.tui.keys import GO, HELP

PAGE = Path(__file__).resolve().parent / "terminal-ui.md"
BEGIN = "<!-- made from aglite/tui/keys.py by docs/update_keys.py -->\n"
END = "<!-- end of what is made -->"


def updated(text: str) -> str:
    """The page's text with the table of keys; those of the screens have a table of their own."""
    before, _, rest = text.partition(BEGIN)
    rows = ["| key | what it does |", "| --- | --- |"]
    for title, keys in HELP:
        if keys is not GO:
            rows += [f"| **{title}** | |", *(f"| `{key.written}` | {key.long} |" for key in keys)]
    return before + BEGIN + "\n" + "\n".join(rows) + "\n\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
