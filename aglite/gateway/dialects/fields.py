"""Reading single fields of a request body, with errors that name the field."""

from __future__ import annotations

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


def boolean(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RequestError(name, f"{name} must be true or false")
    return value


def string(body: dict[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(name, f"{name} must be a string")
    return value


def stops(body: dict[str, Any], name: str = "stop") -> tuple[str, ...]:
    value = body.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise RequestError(name, f"{name} must be a string or a list of strings")
    return tuple(one for one in value if one)


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
