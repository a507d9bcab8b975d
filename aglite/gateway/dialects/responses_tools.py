"""Tools of the Responses API: the functions that the model is shown, and what each was before.

The model knows plain functions only. A tool of a namespace becomes a function with the namespace in its name, a
freeform ("custom") tool a function with one string, `input`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from aglite.gateway.dialects.base import RequestError

_COMMON = "functions"
"""The namespace of tools that have none."""


class Origin(NamedTuple):
    """What a function was in the request."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None


@dataclass(slots=True)
class Tools:
    """The tools of a request."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)
    """By the function's name; only of those that are not plain functions."""
    left_out: list[str] = field(default_factory=list)
    """Types of tools that run at the service and cannot be served."""
    taken: set[str] = field(default_factory=set)
    """The names of `functions`."""

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.functions]


@dataclass(slots=True)
class Choice:
    """What `tool_choice` says."""

    calls_tools: bool = True
    must_call: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    """The functions that may be called, if not all of them."""


def flat_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a tool of a namespace."""
    plain = not namespace or namespace == _COMMON
    return name if plain else f"{namespace.rstrip('_')}__{name}"  # type: ignore[union-attr]


def read_tools(body: dict[str, Any]) -> Tools:
    """The tools of a request: its own and those that items of its input add. Raises RequestError."""
    tools = Tools()
    _read_list(tools, body.get("tools"), None, "tools")
    items = body.get("input")
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            _read_list(tools, item.get("tools"), None, f"input[{index}].tools")
    return tools


def _read_list(tools: Tools, value: Any, namespace: str | None, where: str) -> None:
    if value is None:
        return
    if not isinstance(value, list):
        raise RequestError(where, f"{where} must be a list of tools")
    for index, tool in enumerate(value):
        _read(tools, tool, namespace, f"{where}[{index}]")


def _read(tools: Tools, tool: Any, namespace: str | None, where: str) -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise RequestError(where, f"{where} must be an object with a type")
    if kind not in ("function", "custom", "namespace"):
        tools.left_out.append(kind)
        return
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name", f"{where}.name must be a name")
    if kind == "namespace":
        if namespace is not None:
            raise RequestError(where, f"{where}: a namespace cannot be in another")
        _read_list(tools, tool.get("tools"), name, f"{where}.tools")
        return
    flat = flat_name(namespace, name)
    if flat in tools.taken:
        raise RequestError(f"{where}.name", f"{where}.name: there are two tools with the name {flat!r}")
    function: dict[str, Any] = {"name": flat}
    description = tool.get("description")
    if isinstance(description, str):
        function["description"] = description
    if kind == "custom":
        function["parameters"] = _input_of(tool.get("format"), where)
    else:
        parameters = tool.get("parameters")
        if not isinstance(parameters, dict | None):
            raise RequestError(f"{where}.parameters", f"{where}.parameters must be a JSON schema")
        if parameters is not None:
            function["parameters"] = parameters
    if kind == "custom" or namespace is not None:
        tools.origins[flat] = Origin(kind, name, namespace)  # type: ignore[arg-type]
    tools.taken.add(flat)
    tools.functions.append({"type": "function", "function": function})


def _input_of(format_: Any, where: str) -> dict[str, Any]:
    about = "What the tool is given, as plain text"
    if format_ is not None:
        if not isinstance(format_, dict) or format_.get("type") not in ("text", "grammar"):
            raise RequestError(f"{where}.format", f"{where}.format must be of type text or grammar")
        if format_["type"] == "grammar":
            about += f", in the form of this {format_.get('syntax')} grammar:\n{format_.get('definition')}"
    text = {"type": "string", "description": about}
    return {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}


def read_choice(value: Any, tools: Tools) -> Choice:
    """Raises RequestError for a choice that cannot be made."""
    if value in (None, "auto"):
        return Choice()
    if value == "none":
        return Choice(calls_tools=False)
    if value == "required":
        if not tools.functions:
            raise RequestError("tool_choice", "tool_choice is required, but there is no tool that could be called")
        return Choice(must_call=tuple(tools.names))
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("function", "custom"):
        return Choice(must_call=(_named(value, _known(tools), "tool_choice"),))
    if kind == "allowed_tools":
        listed = value.get("tools")
        if not isinstance(listed, list) or not listed:
            raise RequestError("tool_choice.tools", "tool_choice.tools must be a list of tools")
        known = _known(tools)
        names = tuple(_named(one, known, f"tool_choice.tools[{at}]") for at, one in enumerate(listed))
        if value.get("mode") == "required":
            return Choice(must_call=names)
        if value.get("mode") == "auto":
            return Choice(only=names)
        raise RequestError("tool_choice.mode", "tool_choice.mode must be auto or required")
    raise RequestError(
        "tool_choice",
        "tool_choice can be auto, none, required, a function or custom tool, or allowed_tools; it is "
        f"{kind or value!r}",
    )


def _known(tools: Tools) -> dict[str, str]:
    """The functions by all the names that a choice may give them: the earliest one of a name."""
    known: dict[str, str] = {}
    for flat in tools.names:
        known.setdefault(flat, flat)
        if (origin := tools.origins.get(flat)) is not None:
            known.setdefault(origin.name, flat)
    return known


def _named(choice: Any, known: dict[str, str], where: str) -> str:
    name = choice.get("name") if isinstance(choice, dict) else None
    if isinstance(name, str) and name in known:
        return known[name]
    raise RequestError(f"{where}.name", f"{where}.name must be one of the tools, it is {name!r}")
