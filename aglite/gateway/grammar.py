"""What a reply must look like, in the words that engines understand: a structural tag of xgrammar, which is JSON.

vLLM takes it as it is (`structured_outputs: {"structural_tag": ...}`); the embedded engine translates it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from aglite.gateway.dialects import fields
from aglite.gateway.dialects.base import Request, RequestError
from aglite.gateway.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from aglite.gateway.renderers import ChatRenderer

Format = dict[str, Any]
"""One format of a structural tag."""

WHITESPACE = 32
"""Most characters of white space in a row, where JSON allows any number: small models never stop otherwise."""


def grammar_of(request: Request, renderer: ChatRenderer, prompt_ids: Sequence[int]) -> str | None:
    """The structural tag that the responses to a request are held to; None if they are free.

    A forced tool call comes before a schema. Where a schema is asked for and tools may be called, either will do.
    Raises RequestError where the model's family is not known well enough.
    """
    field = request.constrained_by
    if not field:
        return None
    if request.must_call:
        answer = _calls(request, request.must_call, renderer)
    else:
        answer = json_text(request.schema or {}, lenient=not request.schema_strict)
        names = fields.tool_names(request.tools) if request.calls_tools else ()
        if names:
            answer = {"type": "or", "elements": [answer, _calls(request, names, renderer)]}
    framed = renderer.framed(prompt_ids, answer)
    if framed is None:
        reason = f"replies of the model family {renderer.family!r} cannot be constrained"
        raise RequestError(field, f"{field}: {reason}", "unsupported_value")
    return orjson.dumps({"type": "structural_tag", "format": framed}).decode()


def _calls(request: Request, names: Sequence[str], renderer: ChatRenderer) -> Format:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in request.tools}
    functions = [(name, _arguments(schemas[name], f"the parameters of tool {name!r}")) for name in dict.fromkeys(names)]
    calls = renderer.calls_format(functions, request.one_call)
    if calls is None:
        field = request.constrained_by
        wish = "a tool call cannot be forced" if request.must_call else "a schema cannot be combined with tools"
        raise RequestError(field, f"{field}: with the model family {renderer.family!r} {wish}", "unsupported_value")
    return calls


def _arguments(schema: Any, where: str) -> Format:
    """Arguments are an object, whatever else the tool's schema says. What of it an engine does not know is left to the
    tool, as schemas of tools are written for its reader."""
    return json_text({**fields.json_schema(schema or {}, where), "type": "object"}, lenient=True)


# formats


def json_text(schema: dict[str, Any], *, lenient: bool) -> Format:
    """JSON that satisfies a schema; `lenient`: keywords that an engine cannot enforce are ignored.

    `x-guidance` is the schema's own way to instruct llguidance; xgrammar ignores unknown keywords in any case.
    """
    kept = {key: value for key, value in schema.items() if key != "x-guidance"}
    if lenient:
        kept["x-guidance"] = {"lenient": True}
    return {"type": "json_schema", "json_schema": kept, "max_whitespace_cnt": WHITESPACE}


def text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def marker(tokenizer: TextTokenizer, value: str) -> Format:
    """A marker of a template: the token of that name, or the text where the tokenizer has no such token."""
    return text(value) if tokenizer.token_id(value) is None else {"type": "token", "token": value}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def hermes_calls(tokenizer: TextTokenizer, functions: Sequence[tuple[str, Format]], one_call: bool) -> Format:
    """`<tool_call>` blocks with JSON in them, of (name, format of the arguments)."""
    opening, closing = marker(tokenizer, "<tool_call>"), marker(tokenizer, "</tool_call>")
    blocks = [
        sequence(opening, text(f'\n{{"name": {_quoted(name)}, "arguments": '), arguments, text("}\n"), closing)
        for name, arguments in functions
    ]
    block = blocks[0] if len(blocks) == 1 else {"type": "or", "elements": blocks}
    if one_call:
        return block
    return sequence(block, {"type": "star", "content": sequence(text("\n"), block)})


def json_call(functions: Sequence[tuple[str, Format]]) -> Format:
    """Llama 3's only call: a JSON object in the place of a text."""
    calls = [
        sequence(text(f'{{"name": {_quoted(name)}, "parameters": '), arguments, text("}"))
        for name, arguments in functions
    ]
    return calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}


def after_reasoning(tokenizer: TextTokenizer, answer: Format, *, opened: bool, stop_ids: Sequence[int]) -> Format:
    """An answer after `<think>...</think>`, which may be missing unless the prompt has `opened` it."""
    think, unthink = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    if think is None or unthink is None:
        return answer
    gap = optional({"type": "or", "elements": [text("\n\n"), text("\n")]})
    end: list[Format] = [
        {"type": "any_tokens", "exclude_tokens": [think, unthink, *stop_ids]},
        {"type": "token", "token": unthink},
        gap,
    ]
    if opened:
        return sequence(*end, answer)
    return sequence(optional(sequence({"type": "token", "token": think}, *end)), answer)


def _quoted(name: str) -> str:
    return orjson.dumps(name).decode()
