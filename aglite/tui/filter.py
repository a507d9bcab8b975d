"""What one types to find rows: words, and conditions on columns. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

_CONDITION = re.compile(r"^([a-z_]+)(<=|>=|!=|[:=<>])(.+)$")
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}

Match = Callable[[Mapping[str, str], Mapping[str, Any]], bool]
"""Of the texts of a row's columns and the row itself."""


def matcher(query: str) -> Match:
    """Whether a row has all words of `query` somewhere in it (whatever their case), and meets its conditions:
    `state:fail` (the column begins so), `state=failed`, `state!=done`, `reward<0.5`, `calls>=3`.

    A word that looks like a condition on a column that there is not is a word.
    """
    terms = [(word, _CONDITION.match(word)) for word in query.lower().split()]

    def match(cells: Mapping[str, str], row: Mapping[str, Any]) -> bool:
        return all(_meets(word, condition, cells, row) for word, condition in terms)

    return match


def _meets(word: str, condition: re.Match[str] | None, cells: Mapping[str, str], row: Mapping[str, Any]) -> bool:
    if condition:
        name, sign, wanted = condition.groups()
        if name in cells or name in row:
            return _holds(row.get(name, cells.get(name)), cells.get(name, ""), sign, wanted)
    return any(word in text.lower() for text in cells.values()) or word in str(row.get("id", "")).lower()


def _holds(value: Any, text: str, sign: str, wanted: str) -> bool:
    known = "" if value is None else str(value).lower()
    if sign == ":":
        return known.startswith(wanted) or text.lower().startswith(wanted)
    if sign in ("=", "!="):
        equal = known == wanted or text.lower() == wanted or _number(value) == _number(wanted) is not None
        return equal == (sign == "=")
    number, limit = _number(value), _number(wanted)
    return number is not None and limit is not None and _COMPARE[sign](number, limit)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
