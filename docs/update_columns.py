"""Brings docs/measuring.md up to date with the columns of aglite/columns.py: `python docs/update_columns.py`."""

from __future__ import annotations

from pathlib import Path

from aglite.columns import COLUMNS

PAGE = Path(__file__).resolve().parent / "measuring.md"
BEGIN = "<!-- made from aglite/columns.py by docs/update_columns.py -->\n"
END = "<!-- end of what is made -->"


def updated(text: str) -> str:
    """The page's text with a table for each kind of row."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + "\n".join(_table(what) for what in COLUMNS) + "\n" + END + rest.partition(END)[2]


def _table(what: str) -> str:
    rows = [f"| `{name}` | {kind} | {meaning} |" for name, (kind, meaning) in COLUMNS[what].items()]
    return f"### {what}\n\n| column | type | meaning |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
