"""OpenAI's Chat Completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson

from aglite.gateway.dialects import fields
from aglite.gateway.dialects.base import Choice, Outcome, Problem, Request, RequestError, TokenInfo
from aglite.gateway.replies import Piece, Reasoning, Text, ToolStart

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MEDIA = {"image_url", "image", "input_image", "input_audio", "audio", "video_url", "video", "file", "input_file"}


class ChatDialect:
    name = "chat"
    keepalive = b": keep-alive\n\n"

    def parse(self, body: Any) -> Request:
        body = fields.as_object(body)
        kept = fields.asked(body)
        most = fields.integer(body, "max_completion_tokens", 1)
        limit = fields.integer(body, "max_tokens", 1)
        most = limit if most is None else most
        if fields.integer(body, "top_logprobs", 0, 20):
            raise RequestError(
                "top_logprobs",
                "top_logprobs is not supported: only the log-probabilities of the sampled tokens are known",
            )
        tools, left_out = _tools(body.get("tools"))
        options = body.get("stream_options")
        if options is not None and not isinstance(options, dict):
            raise RequestError("stream_options", "stream_options must be an object")
        request = Request(
            messages=_messages(body.get("messages")),
            tools=tools,
            calls_tools=_tool_choice(body.get("tool_choice"), bool(tools)),
            max_tokens=most,
            stops=fields.stops(body),
            n=fields.integer(body, "n", 1, 128) or 1,
            stream=fields.boolean(body, "stream"),
            include_usage=fields.boolean(options or {}, "include_usage"),
            logprobs=fields.boolean(body, "logprobs"),
            model=fields.string(body, "model") or "",
            asked=kept,
        )
        _response_format(body.get("response_format"))
        if left_out:
            kept["tools_left_out"] = left_out
        return request

    def writer(self, request: Request, model: str) -> ChatWriter:
        return ChatWriter(request, model)

    def error(self, problem: Problem) -> bytes:
        return orjson.dumps(openai_error(problem))

    def error_event(self, problem: Problem) -> bytes:
        return b"data: " + self.error(problem) + b"\n\n"

    def context_problem(self, request: Request, prompt_tokens: int, context_length: int) -> Problem:
        return Problem(
            400,
            "context_length",
            f"This model's maximum context length is {context_length} tokens. However, your request has "
            f"{prompt_tokens} input tokens. Please reduce the length of the input messages.",
            param="messages",
            code="context_length_exceeded",
        )


_ERROR_TYPES = {
    "auth": "authentication_error",
    "not_found": "not_found_error",
    "limit": "permission_error",
    "held": "overloaded_error",
    "engine": "server_error",
    "store": "server_error",
    "ended": "authentication_error",
}


def openai_error(problem: Problem) -> dict[str, Any]:
    return {
        "error": {
            "message": problem.message,
            "type": _ERROR_TYPES.get(problem.kind, "invalid_request_error"),
            "param": problem.param,
            "code": problem.code,
        }
    }


class ChatWriter:
    """Body and events of one chat completion."""

    def __init__(self, request: Request, model: str) -> None:
        self._request = request
        self._id = f"chatcmpl-{secrets.token_hex(12)}"
        self._created = int(time.time())
        self._model = model
        chunk = {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": model}
        self._head = b"data: " + orjson.dumps(chunk)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"

    def open(self) -> bytes:
        return b"".join(self._event(i, {"role": "assistant", "content": ""}) for i in range(self._request.n))

    def pieces(self, index: int, pieces: Sequence[Piece], tokens: Sequence[TokenInfo]) -> bytes:
        events = []
        for piece in pieces:
            if isinstance(piece, Text):
                delta: dict[str, Any] = {"content": piece.text}
            elif isinstance(piece, Reasoning):
                delta = {"reasoning_content": piece.text}
            elif isinstance(piece, ToolStart):
                function = {"name": piece.name, "arguments": ""}
                delta = {
                    "tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]
                }
            else:
                delta = {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
            events.append(self._event(index, delta, tokens=tokens))
            tokens = ()
        if tokens:  # sampled, but nothing to show yet: their log-probabilities are not held back
            events.append(self._event(index, {}, tokens=tokens))
        return b"".join(events)

    def close(self, outcome: Outcome) -> bytes:
        events = [self._event(choice.index, {}, finish=choice.finish_reason) for choice in outcome.choices]
        if self._request.include_usage:
            events.append(self._head + b'],"usage":' + orjson.dumps(usage(outcome)) + b"}\n\n")
        events.append(b"data: [DONE]\n\n")
        return b"".join(events)

    def body(self, outcome: Outcome) -> bytes:
        return orjson.dumps(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": self._created,
                "model": self._model,
                "choices": [self._choice(choice) for choice in outcome.choices],
                "usage": usage(outcome),
            }
        )

    def _choice(self, choice: Choice) -> dict[str, Any]:
        reply = choice.reply
        message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["content"] = reply.text or None
            message["tool_calls"] = reply.message()["tool_calls"]
        logprobs = {"content": _logprobs(choice.tokens), "refusal": None} if self._request.logprobs else None
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def _event(
        self, index: int, delta: dict[str, Any], *, tokens: Sequence[TokenInfo] = (), finish: str | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": finish}
        if tokens:
            choice["logprobs"] = {"content": _logprobs(tokens), "refusal": None}
        return self._head + orjson.dumps(choice) + self._tail


def usage(outcome: Outcome) -> dict[str, int]:
    return {
        "prompt_tokens": outcome.prompt_tokens,
        "completion_tokens": outcome.completion_tokens,
        "total_tokens": outcome.prompt_tokens + outcome.completion_tokens,
    }


def _logprobs(tokens: Sequence[TokenInfo]) -> list[dict[str, Any]]:
    return [
        {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes), "top_logprobs": []}
        for token in tokens
    ]


# requests


def _messages(value: Any) -> list[dict[str, Any]]:
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


def _tools(value: Any) -> tuple[list[dict[str, Any]], list[str]]:
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


def _tool_choice(value: Any, any_tools: bool) -> bool:
    if value in (None, "auto", "none"):
        return value != "none"
    if value == "required" or isinstance(value, dict):
        raise RequestError(
            "tool_choice", "tool_choice can be auto or none: this engine cannot force a tool call", "unsupported_value"
        )
    raise RequestError("tool_choice", f"tool_choice must be auto or none, it is {value!r}")


def _response_format(value: Any) -> None:
    if value is None:
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if kind != "text":
        raise RequestError(
            "response_format",
            f"response_format can be text: this engine cannot constrain a reply to {kind!r}",
            "unsupported_value",
        )
