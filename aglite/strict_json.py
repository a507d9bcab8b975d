"""JSON for whoever reads it, in any language, whatever a run has measured and was given."""

from __future__ import annotations

import json
import math
from typing import Any


def dumps(value: Any) -> str:
    """A JSON value as text, in ASCII: agents leave halves of characters, which are no UTF-8.

    Numbers that are not finite, as the loss of an update that was skipped for it, have no word in JSON: they are left
    out of objects, and null in lists.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items() if not _is_odd(inner)}
    if isinstance(value, list | tuple):
        return [None if _is_odd(inner) else _finite(inner) for inner in value]
    return value


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
