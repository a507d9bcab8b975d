"""Anthropic's Messages: `POST /v1/messages` and `/v1/messages/count_tokens`. What is written is in messages_writer."""

from __future__ import annotations

from typing import Any

import orjson

from aglite.gateway.dialects import fields
from aglite.gateway.dialects.base import Problem, Request, RequestError
from aglite.gateway.dialects.messages_writer import INVALID_JSON, MessagesWriter, error_body

_MEDIA = {"image", "document", "container_upload", "browser_state"}

_ATTRIBUTION = "x-anthropic-billing-header:"
"""How Claude Code begins a system block that is meant for the bill, not for the model. It changes from call to call."""

THREADS = "thread_unsupported_request"
"""Error code on which the official SDK goes on with whole histories."""


class MessagesDialect:
    name = "messages"

    def parse(self, body: Any) -> Request:
        body = fields.as_object(body)
        request = _conversation(body)
        request.max_tokens = fields.integer(body, "max_tokens", 1)
        if request.max_tokens is None:
            raise RequestError("max_tokens", "max_tokens is missing: it must be an integer, at least 1")
        if request.messages[-1]["role"] == "assistant":
            raise RequestError(
                "messages", "messages must end with a user message: continuing an assistant's message is not supported"
            )
        request.stops = fields.stops(body, "stop_sequences")
        request.stream = fields.boolean(body, "stream")
        _sampling(body, request.asked)
        return request

    def writer(self, request: Request, model: str) -> MessagesWriter:
        return MessagesWriter(request, model)

    def error(self, problem: Problem) -> bytes:
        return error_body(problem)

    def context_problem(self, request: Request, prompt_tokens: int, context_length: int) -> Problem:
        message = f"prompt is too long: {prompt_tokens} tokens > {context_length} maximum"
        return Problem(400, "context_length", message, param="messages")


class CountTokensDialect(MessagesDialect):
    """The same request, of which only the length of its prompt is asked."""

    def parse(self, body: Any) -> Request:
        return _conversation(fields.as_object(body))

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})


def _conversation(body: dict[str, Any]) -> Request:
    """All that reaches the prompt, and what is asked of the reply's form."""
    for name, value in (("thread", THREADS), ("compaction", None)):
        if body.get(name) is not None:
            raise RequestError(name, f"{name} is not supported: send the whole conversation in messages", value)
    tools, left_out = _tools(body.get("tools"))
    if body.get("mcp_servers"):
        left_out.append("mcp_servers")
    request = Request(
        messages=_system(body.get("system")) + _messages(body.get("messages")),
        tools=tools,
        model=fields.string(body, "model") or "",
    )
    if left_out:
        request.asked["tools_left_out"] = left_out
    _schema(body, request)
    _tool_choice(body.get("tool_choice"), request)
    return request


def _sampling(body: dict[str, Any], asked: dict[str, Any]) -> None:
    """What is asked of the sampling, checked, for the record."""
    asked.update(
        temperature=fields.number(body, "temperature", 0.0, 2.0),
        top_p=fields.number(body, "top_p", 0.0, 1.0),
        top_k=fields.integer(body, "top_k", 0),
    )
    thinking = fields.mapping(body, "thinking")
    asked["thinking"] = {key: thinking[key] for key in ("type", "budget_tokens") if _scalar(thinking.get(key))}
    effort = fields.mapping(body, "output_config").get("effort")
    asked["effort"] = effort if _scalar(effort) else None
    for name in [name for name, value in asked.items() if value in (None, {})]:
        del asked[name]


def _scalar(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _schema(body: dict[str, Any], request: Request) -> None:
    """The JSON schema that the reply must satisfy: `output_config.format`, or `output_format` as it was called."""
    for where, value in (
        ("output_config.format", fields.mapping(body, "output_config").get("format")),
        ("output_format", body.get("output_format")),
    ):
        if value is None:
            continue
        if not isinstance(value, dict) or value.get("type") != "json_schema":
            raise RequestError(where, f"{where} must be an object of type json_schema")
        request.schema = fields.json_schema(value.get("schema"), f"{where}.schema")
        request.schema_field = where
        return


# tools


def _tools(value: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The tools that come with a schema, and the types of the others: those run at Anthropic, or only its models know
    how to call them."""
    if value is None:
        return [], []
    if not isinstance(value, list):
        raise RequestError("tools", "tools must be a list")
    tools, left_out = [], []
    for index, tool in enumerate(value):
        here = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise RequestError(here, f"{here} must be an object")
        kind = fields.string(tool, "type") if isinstance(tool.get("type"), str | None) else _wrong(f"{here}.type")
        if kind not in (None, "custom"):
            left_out.append(kind)
            continue
        name, description = tool.get("name"), tool.get("description")
        if not isinstance(name, str) or not name:
            raise RequestError(f"{here}.name", f"{here}.name must be a text")
        if not isinstance(tool.get("input_schema"), dict):
            raise RequestError(f"{here}.input_schema", f"{here}.input_schema must be a JSON schema")
        function = {"name": name}
        if description is not None:
            function["description"] = description if isinstance(description, str) else _wrong(f"{here}.description")
        function["parameters"] = tool["input_schema"]
        tools.append({"type": "function", "function": function})
    return tools, left_out


def _tool_choice(value: Any, request: Request) -> None:
    if value is None:
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("auto", "any", "tool", "none"):
        raise RequestError("tool_choice", "tool_choice must be an object of type auto, any, tool or none")
    request.asked["tool_choice"] = kind
    request.one_call = fields.boolean(value, "disable_parallel_tool_use")
    request.calls_tools = kind != "none"
    if kind == "any":
        request.must_call = fields.known_tools(fields.tool_names(request.tools), request.tools, "tool_choice")
    elif kind == "tool":
        name = _string(value, "name", "tool_choice")
        request.must_call = fields.known_tools([name], request.tools, "tool_choice.name")
        request.asked["tool_choice"] = {"type": "tool", "name": name}


# messages


def _wrong(where: str) -> Any:
    raise RequestError(where, f"{where} must be a text")


def _system(value: Any) -> list[dict[str, Any]]:
    if value is None:
        return []
    texts = [text for text in _texts(value, "system") if not text.startswith(_ATTRIBUTION)]
    return [{"role": "system", "content": "\n".join(texts)}] if texts else []


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RequestError("messages", "messages must be a list with at least one message")
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise RequestError(where, f"{where} must be an object")
        role, content = message.get("role"), message.get("content")
        where += ".content"
        if role == "user":
            messages += _user(content, where)
        elif role == "assistant":
            messages.append(_assistant(content, where))
        elif role == "system":
            messages.append({"role": "system", "content": "\n".join(_texts(content, where))})
        else:
            raise RequestError(
                f"messages[{index}].role",
                f"messages[{index}].role must be user, assistant or system, it is {role!r}",
            )
    return messages


def _user(content: Any, where: str) -> list[dict[str, Any]]:
    """Results of tools answer the assistant's turn and come first, whatever else the user says comes after them."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results, texts = [], []
    for here, block, kind in _blocks(content, where):
        if kind == "tool_result":
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": _string(block, "tool_use_id", here),
                    "content": _result(block, f"{here}.content"),
                }
            )
        else:
            texts.append(_text(block, kind, here))
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _result(block: dict[str, Any], where: str) -> str:
    """A failed tool that says nothing says at least that: there is no other place for `is_error` in a prompt."""
    content = block.get("content")
    text = "" if content is None else "\n".join(_texts(content, where))
    return text or ("Error" if block.get("is_error") is True else "")


def _assistant(content: Any, where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, reasoning, calls = [], [], []
    for here, block, kind in _blocks(content, where):
        if kind == "tool_use":
            calls.append(_call(block, here))
        elif kind == "thinking":
            reasoning.append(_string(block, "thinking", here))
        elif kind != "redacted_thinking":  # it holds nothing that this model could read
            texts.append(_text(block, kind, here))
    # Pieces of one reply, as the writer cut it into blocks: nothing was between them.
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(reasoning):
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, value = _string(block, "name", where), block.get("input", {})
    if not isinstance(value, dict):
        raise RequestError(f"{where}.input", f"{where}.input must be an object")
    if value.keys() == {INVALID_JSON} and isinstance(value[INVALID_JSON], str):
        arguments = value[INVALID_JSON]
    else:
        arguments = orjson.dumps(value).decode()
    return {"id": _string(block, "id", where), "type": "function", "function": {"name": name, "arguments": arguments}}


def _texts(content: Any, where: str) -> list[str]:
    """The texts of content that can hold nothing else."""
    if isinstance(content, str):
        return [content]
    return [_text(block, kind, here) for here, block, kind in _blocks(content, where)]


def _text(block: dict[str, Any], kind: str, where: str) -> str:
    if kind == "text":
        return _string(block, "text", where)
    if kind == "tool_reference":
        return _string(block, "tool_name", where)
    if kind in _MEDIA:
        raise RequestError(where, f"{where}: this model reads text only, it cannot take a block of type {kind!r}")
    raise RequestError(f"{where}.type", f"{where}.type: a block of type {kind!r} cannot stand here")


def _blocks(content: Any, where: str) -> list[tuple[str, dict[str, Any], str]]:
    """The blocks of a list, each with its place and its type."""
    if not isinstance(content, list):
        raise RequestError(where, f"{where} must be a string or a list of blocks")
    blocks = []
    for index, block in enumerate(content):
        here = f"{where}[{index}]"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise RequestError(here, f"{here} must be an object with a type")
        blocks.append((here, block, block["type"]))
    return blocks


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    return value if isinstance(value, str) else _wrong(f"{where}.{name}")
