"""Reading single fields of a request body, with errors that name the field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from aglite.gateway.dialects.base import RequestError


def as_object(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise RequestError("body", "the request body must be a JSON object")
    return body


def integer(body: dict[str, Any], name: str, low: int, high: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(name, f"{name} must be an integer")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(name, f"{name} must be {bounds}, it is {value}")
    return value


def number(body: dict[str, Any], name: str, low: float | None = None, high: float | None = None) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(name, f"{name} must be a number")
    if (low is not None and value < low) or (high is not None and value > high):
        raise RequestError(name, f"{name} must be between {low:g} and {high:g}, it is {value}")
    return value


def boolean(body: dict[str, Any], name: str, *, default: bool = False, where: str = "") -> bool:
    """`where`: the whole name of a field that is not at the top of the request."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(where or name, f"{where or name} must be true or false")
    return value


def string(body: dict[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(name, f"{name} must be a string")
    return value


def mapping(body: dict[str, Any], name: str) -> dict[str, Any]:
    """An object in the request; {} if it is not there."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError(name, f"{name} must be an object")
    return value


STOPS = 64
"""The most stop strings of a request; each is looked for at every token."""

STOP_LENGTH = 1000
"""Characters of a stop string."""


def stops(body: dict[str, Any], name: str = "stop") -> tuple[str, ...]:
    value = body.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise RequestError(name, f"{name} must be a string or a list of strings")
    if len(value) > STOPS:
        raise RequestError(name, f"{name} can have {STOPS} strings, it has {len(value)}")
    longest = max(map(len, value), default=0)
    if longest > STOP_LENGTH:
        raise RequestError(name, f"{name} can have strings of {STOP_LENGTH} characters, one has {longest}")
    return tuple(one for one in value if one)


TOP_LOGPROBS = 20
"""The most alternatives that can be asked for beside a sampled token."""

SCHEMA_DEPTH = 100
"""Levels of nesting of a JSON schema, as JSON."""

SCHEMA_BYTES = 131072
"""Size of a JSON schema as JSON text."""


def json_schema(value: Any, where: str) -> dict[str, Any]:
    """A JSON schema that an engine may be given: an object, not too deep and not too large. What it says is for the
    engine to judge."""
    if not isinstance(value, dict):
        raise RequestError(where, f"{where} must be a JSON schema, which is an object")
    depth, level = 0, [value]
    while level:
        depth += 1
        if depth > SCHEMA_DEPTH:
            raise RequestError(where, f"{where} is nested more than {SCHEMA_DEPTH} levels deep")
        inner = (list(one.values()) if isinstance(one, dict) else one for one in level)
        level = [child for children in inner for child in children if isinstance(child, dict | list)]
    size = len(json.dumps(value))
    if size > SCHEMA_BYTES:
        raise RequestError(where, f"{where} has {size} bytes, it can have {SCHEMA_BYTES}")
    return value


def tool_names(tools: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Names of tools in the normal form of requests."""
    return tuple(tool["function"]["name"] for tool in tools)


def known_tools(names: Sequence[str], tools: Sequence[dict[str, Any]], where: str) -> tuple[str, ...]:
    """`names`, each once, checked to be those of function tools of the request."""
    if not names:
        raise RequestError(where, f"{where} wants a tool call, but the request has no function tool for it")
    known = frozenset(tool_names(tools))
    for name in names:
        if name not in known:
            raise RequestError(where, f"{where} names {name!r}, which is not among the function tools of the request")
    return tuple(dict.fromkeys(names))


def shown(value: Any) -> str:
    """A wrong value as an error quotes it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


SAMPLING = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_KEPT = ("top_k", "seed", "n", "logit_bias", "reasoning_effort", "parallel_tool_calls", "tool_choice", "best_of")


def asked(body: dict[str, Any]) -> dict[str, Any]:
    """The sampling that the agent asked for, checked, for the record."""
    kept: dict[str, Any] = {}
    for name in SAMPLING:
        value = number(body, name)
        if value is not None:
            kept[name] = value
    number(body, "temperature", 0.0, 2.0)
    number(body, "top_p", 0.0, 1.0)
    integer(body, "seed", -(2**63), 2**63 - 1)
    integer(body, "top_k", -1)
    for name in _KEPT:
        if body.get(name) is not None:
            kept[name] = body[name]
    return kept
