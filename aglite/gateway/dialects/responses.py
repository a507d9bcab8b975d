"""OpenAI's Responses: `POST /v1/responses`."""

from __future__ import annotations

import secrets
from typing import Any

import orjson

from aglite.gateway.dialects import fields
from aglite.gateway.dialects.base import INSTRUCTIONS, Choice, Outcome, Problem, Request, RequestError
from aglite.gateway.dialects.chat import openai_error
from aglite.gateway.dialects.responses_items import messages_of
from aglite.gateway.dialects.responses_output import Memo
from aglite.gateway.dialects.responses_tools import Origin, read_choice, read_tools
from aglite.gateway.dialects.responses_writer import ResponsesWriter
from aglite.gateway.replies import Reply

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


class ResponsesDialect:
    name = "responses"

    def parse(self, body: Any) -> Request:
        body = fields.as_object(body)
        _refuse(body)
        asked = fields.asked(body)
        tools = read_tools(body)
        choice = read_choice(body.get("tool_choice"), tools)
        functions = tools.functions
        if choice.only is not None:
            only = frozenset(choice.only)
            functions = [tool for tool in functions if tool["function"]["name"] in only]
        reasoning = fields.mapping(body, "reasoning")
        effort = fields.string(reasoning, "effort")
        previous = fields.string(body, "previous_response_id")
        instructions = fields.string(body, "instructions")
        messages = messages_of(body["input"]) if body.get("input") is not None else []
        if not messages and previous is None:
            raise RequestError("input", "input is missing: a text, or a list with at least one item")
        if instructions:
            messages.insert(0, {"role": "system", "content": instructions})
            asked[INSTRUCTIONS] = True
        include = _include(body)
        schema, strict = _schema(fields.mapping(body, "text").get("format"))
        top = fields.integer(body, "top_logprobs", 0, fields.TOP_LOGPROBS)
        store = body.get("store") is None or fields.boolean(body, "store")
        notes = {
            "reasoning_effort": effort,
            "max_tool_calls": fields.integer(body, "max_tool_calls", 1),
            "previous_response_id": previous,
            "tools_left_out": tools.left_out,
            "tool_origins": {flat: list(origin) for flat, origin in tools.origins.items()} if store else None,
        }
        asked.update({name: value for name, value in notes.items() if value})
        return Request(
            messages=messages,
            tools=functions,
            calls_tools=choice.calls_tools,
            must_call=choice.must_call,
            one_call=not fields.boolean(body, "parallel_tool_calls", default=True),
            schema=schema,
            schema_strict=strict,
            schema_field="text.format",
            max_tokens=fields.integer(body, "max_output_tokens", 1),
            stream=fields.boolean(body, "stream"),
            logprobs=LOGPROBS in include or bool(top),
            top_logprobs=top or 0,
            previous=previous,
            reply_id=f"resp_{secrets.token_hex(16)}",
            nameable=store,
            model=fields.string(body, "model") or "",
            asked=asked,
            memo=Memo(_echo(body, asked, store), tools.origins, ENCRYPTED in include),
        )

    def writer(self, request: Request, model: str) -> ResponsesWriter:
        return ResponsesWriter(request, model)

    def recorded(self, reply_id: str, facts: dict[str, Any], message: dict[str, Any]) -> bytes:
        """A reply as it is in the store: the facts of its call and its message. Of the request, only what is recorded
        is repeated."""
        asked = facts["request"]["asked"]
        origins = {flat: Origin(*origin) for flat, origin in asked.get("tool_origins", {}).items()}
        body = {
            name: asked[name] for name in ("previous_response_id", "tool_choice", "max_tool_calls") if name in asked
        }
        body["max_output_tokens"] = asked["max_tokens"]
        memo = Memo(_echo(body, asked, True), origins, created_at=facts["started_at"])
        choice = Choice(0, Reply.of_message(message), facts["finish_reason"])
        outcome = Outcome([choice], facts["prompt_len"], facts["response_len"])
        return ResponsesWriter(Request(reply_id=reply_id, memo=memo), asked["model"]).body(outcome)

    def error(self, problem: Problem) -> bytes:
        return orjson.dumps(openai_error(problem))

    def context_problem(self, request: Request, prompt_tokens: int, context_length: int) -> Problem:
        return Problem(
            400,
            "context_length",
            f"Your input exceeds the context window of this model: it is {prompt_tokens} tokens long, the maximum "
            f"context length is {context_length} tokens. Please adjust your input and try again.",
            param="input",
            code="context_length_exceeded",
        )


class InputTokensDialect(ResponsesDialect):
    """The same request, of which only the length of its prompt is asked."""

    def count(self, tokens: int) -> bytes:
        return orjson.dumps({"object": "response.input_tokens", "input_tokens": tokens})


def _refuse(body: dict[str, Any]) -> None:
    """Turn down what would need a service behind it."""
    if fields.boolean(body, "background"):
        raise RequestError("background", "background is not supported: wait for the response, or stream it")
    if body.get("conversation") is not None:
        raise RequestError(
            "conversation", "conversation is not supported: give previous_response_id, or the whole input"
        )
    if body.get("prompt") is not None:
        raise RequestError("prompt", "prompt templates are not supported: give instructions and input")
    fields.mapping(body, "stream_options")
    if body.get("truncation") not in (None, "auto", "disabled"):
        raise RequestError("truncation", "truncation must be auto or disabled")


def _echo(body: dict[str, Any], asked: dict[str, Any], store: bool) -> dict[str, Any]:
    """The fields of a response that repeat the request; `truncation` is what is done."""
    metadata = fields.mapping(body, "metadata")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise RequestError(f"metadata.{key}", f"metadata.{key} must be a string")
    reasoning, text = fields.mapping(body, "reasoning"), fields.mapping(body, "text")
    echo = {
        "background": False,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": metadata,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "store": store,
        "temperature": asked.get("temperature"),
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": body.get("top_logprobs") or 0,
        "top_p": asked.get("top_p"),
        "truncation": "disabled",
    }
    for name in ("prompt_cache_key", "safety_identifier", "user"):
        if fields.string(body, name) is not None:
            echo[name] = body[name]
    return echo


def _include(body: dict[str, Any]) -> list[str]:
    value = body.get("include")
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise RequestError("include", "include must be a list of strings")
    return value


def _schema(format_: Any) -> tuple[dict[str, Any] | None, bool]:
    """The JSON schema of `text.format` (None: text) and whether it must be enforced whole."""
    if format_ is None:
        return None, False
    kind = format_.get("type") if isinstance(format_, dict) else None
    if kind == "text":
        return None, False
    if kind == "json_object":
        return {"type": "object"}, False
    if kind != "json_schema":
        raise RequestError(
            "text.format.type", f"text.format.type must be text, json_object or json_schema, not {kind!r}"
        )
    schema = fields.json_schema(format_.get("schema"), "text.format.schema")
    return schema, fields.boolean(format_, "strict", where="text.format.strict")
