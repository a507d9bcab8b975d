"""Reading a Chat Completions request: messages, tools, and what the reply must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from aglite.gateway.dialects import fields
from aglite.gateway.dialects.base import RequestError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MEDIA = {"image_url", "image", "input_image", "input_audio", "audio", "video_url", "video", "file", "input_file"}


def read_messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RequestError("messages", "messages must be a list with at least one message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(where, f"{where} must be an object")
    asked_role = message.get("role")
    role = _ROLES.get(asked_role) if isinstance(asked_role, str) else None
    if role is None:
        raise RequestError(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}, it is {asked_role!r}")
    normal: dict[str, Any] = {"role": role, "content": _content(message.get("content"), role, f"{where}.content")}
    if role == "assistant":
        calls = _tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
        if calls:
            normal["tool_calls"] = calls
        for name in ("reasoning_content", "reasoning"):
            if isinstance(message.get(name), str) and message[name]:
                normal["reasoning_content"] = message[name]
                break
    elif role == "tool":
        call_id = message.get("tool_call_id")
        if call_id is not None and not isinstance(call_id, str):
            raise RequestError(f"{where}.tool_call_id", f"{where}.tool_call_id must be a string")
        normal["tool_call_id"] = call_id or ""
    if role != "assistant" and isinstance(message.get("name"), str):
        normal["name"] = message["name"]
    return normal


def _content(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role in ("assistant", "tool"):
            return ""
        raise RequestError(where, f"{where} is missing")
    if not isinstance(content, list):
        raise RequestError(where, f"{where} must be a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        here = f"{where}[{index}]"
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _MEDIA:
            raise RequestError(here, f"{here}: this model reads text only, it cannot take a part of type {kind!r}")
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise RequestError(here, f"{here} must be a part of type text, it is {kind!r}")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(where, f"{where} must be a list")
    calls = []
    for index, call in enumerate(value):
        here = f"{where}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(here, f"{here} must have a function with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, dict):  # some harnesses send the object itself
            arguments = orjson.dumps(arguments).decode()
        if arguments is not None and not isinstance(arguments, str):
            raise RequestError(f"{here}.function.arguments", f"{here}.function.arguments must be JSON text")
        call_id = call.get("id")
        calls.append(
            {
                "id": call_id if isinstance(call_id, str) else "",
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments or ""},
            }
        )
    return calls


def read_tools(value: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The function tools, and the types of those that cannot be served."""
    if value is None:
        return [], []
    if not isinstance(value, list):
        raise RequestError("tools", "tools must be a list")
    tools, left_out = [], []
    for index, tool in enumerate(value):
        here = f"tools[{index}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise RequestError(here, f"{here} must be an object with a type")
        if tool["type"] != "function":
            left_out.append(tool["type"])
            continue
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(f"{here}.function", f"{here}.function must be an object with a name")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise RequestError(f"{here}.function.parameters", f"{here}.function.parameters must be a JSON schema")
        kept = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
        tools.append({"type": "function", "function": kept})
    return tools, left_out


@dataclass(slots=True, frozen=True)
class ToolChoice:
    """`tools` are those that the model is told of; of `must_call` the reply must call one."""

    tools: list[dict[str, Any]]
    calls_tools: bool = True
    must_call: tuple[str, ...] = ()


def read_tool_choice(value: Any, tools: list[dict[str, Any]]) -> ToolChoice:
    if value in (None, "auto", "none"):
        return ToolChoice(tools, calls_tools=value != "none")
    if value == "required":
        return ToolChoice(tools, must_call=fields.known_tools(fields.tool_names(tools), tools, "tool_choice"))
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        name = _function_name(value, "tool_choice.function")
        return ToolChoice(tools, must_call=fields.known_tools((name,), tools, "tool_choice.function.name"))
    if kind == "allowed_tools":
        return _allowed_tools(value.get("allowed_tools"), tools)
    raise RequestError(
        "tool_choice",
        "tool_choice must be auto, none, required, or an object of type function or allowed_tools, it is "
        f"{fields.shown(value)}",
    )


def _allowed_tools(value: Any, tools: list[dict[str, Any]]) -> ToolChoice:
    """The model is told of the allowed tools only, so there is no other that it could call."""
    where = "tool_choice.allowed_tools"
    if not isinstance(value, dict) or not isinstance(value.get("tools"), list):
        raise RequestError(where, f"{where} must be an object with a mode and a list of tools")
    if value.get("mode") not in ("auto", "required"):
        raise RequestError(f"{where}.mode", f"{where}.mode must be auto or required")
    names = tuple(_function_name(tool, f"{where}.tools[{at}].function") for at, tool in enumerate(value["tools"]))
    names = fields.known_tools(names, tools, f"{where}.tools")
    among = frozenset(names)
    allowed = [tool for tool in tools if tool["function"]["name"] in among]
    return ToolChoice(allowed, must_call=names if value["mode"] == "required" else ())


def _function_name(value: Any, where: str) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.name", f"{where}.name must be the name of a tool")
    return name


def read_response_format(value: Any, kept: dict[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """The JSON schema of the reply (None: text) and whether it must be enforced whole. Notes the format in `kept`."""
    if value is None:
        return None, False
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None, False
    if kind == "json_object":
        kept["response_format"] = kind
        return {"type": "object"}, False
    if kind != "json_schema":
        raise RequestError(
            "response_format.type",
            f"response_format.type must be text, json_object or json_schema, it is {fields.shown(kind)}",
        )
    given = value.get("json_schema")
    if not isinstance(given, dict):
        raise RequestError("response_format.json_schema", "response_format.json_schema must be an object")
    schema = fields.json_schema(given.get("schema"), "response_format.json_schema.schema")
    kept["response_format"] = kind
    return schema, fields.boolean(given, "strict", where="response_format.json_schema.strict")
