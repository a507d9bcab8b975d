"""Input items of the Responses API as messages in normal form.

One reply of ours leaves as several output items (reasoning, message, calls) and comes back as several input items; here
they become the one assistant message again that was recorded.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

import orjson

from aglite.gateway.dialects.base import QUOTED, RequestError
from aglite.gateway.dialects.responses_tools import flat_name

Message = dict[str, Any]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
RAW = "_raw"
"""Ends the call id of a freeform call whose `input` is the whole of the sampled arguments: they were no object with an
`input` that could be taken out. So they are put back as they were."""

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_MEDIA = ("input_image", "input_file", "input_audio", "image", "computer_screenshot")
_OWN = re.compile(r"(?:msg|rs|fc|ctc)_([0-9a-f]{32})[0-9a-f]{2,}")
_SEALED = "aglite:"


def item_id(prefix: str, reply_id: str, index: int) -> str:
    """The id of an output item: it tells which reply the item is part of."""
    return f"{prefix}_{reply_id.removeprefix('resp_')}{index:02x}"


def seal(reasoning: str) -> str:
    """Reasoning as `encrypted_content`, for clients that keep nothing else of it. It is encoded, not a secret."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def messages_of(value: Any) -> list[Message]:
    """The messages of a request's `input`: a text, or a list of items. Raises RequestError."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RequestError("input", "input must be a text or a list of items")
    reader = _Reader()
    for index, item in enumerate(value):
        reader.add(item, f"input[{index}]")
    return reader.messages


class _Reader:
    """Collects items into messages. Items of the model that follow each other are one message, unless they are known to
    come from different replies or could not be one reply."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._open: Message | None = None
        self._reply: str | None = None  # the reply that the open message is, if an item's id has told
        self._last = ""

    def add(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise RequestError(where, f"{where} must be an object")
        kind = item.get("type")
        if kind is None:
            kind = "message" if "role" in item else "item_reference" if "id" in item else None
        if kind == "message":
            self._message(item, where)
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, kind, where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            call_id = _string(item, "call_id", where) or ""
            if kind == "custom_tool_call_output":
                call_id = call_id.removesuffix(RAW)
            text = _text(item.get("output"), f"{where}.output", "\n")
            self._other({"role": "tool", "content": text, "tool_call_id": call_id})
        elif kind == "reasoning":
            text = _reasoning(item, where)
            if text:  # nothing to read is reasoning of another model, encrypted for its own service
                message = self._assistant("reasoning", item)
                if message is not None:
                    message["reasoning_content"] = message.get("reasoning_content", "") + text
        elif kind == "agent_message":  # between the agents of one program, Codex for one
            self._other({"role": "user", "content": _text(item.get("content"), f"{where}.content", "")})
        elif kind == "additional_tools":
            return  # read with the request's other tools
        elif kind == "item_reference":
            self._reference(item, where)
        else:
            raise RequestError(
                f"{where}.type",
                f"{where}: items of type {kind!r} are not supported; messages, reasoning, function and custom tool "
                "calls and their outputs are",
            )

    def _message(self, item: Message, where: str) -> None:
        asked = item.get("role")
        role = ROLES.get(asked) if isinstance(asked, str) else None
        if role is None:
            raise RequestError(f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}, it is {asked!r}")
        if role != "assistant":
            self._other({"role": role, "content": _text(item.get("content"), f"{where}.content", "\n")})
            return
        text = _text(item.get("content"), f"{where}.content", "")
        message = self._assistant("text", item)
        if message is not None:
            message["content"] += text

    def _call(self, item: Message, kind: str, where: str) -> None:
        name = _string(item, "name", where)
        if not name:
            raise RequestError(f"{where}.name", f"{where}.name is missing")
        call_id = _string(item, "call_id", where) or _string(item, "id", where) or ""
        if kind == "function_call":
            arguments = item.get("arguments")
            if isinstance(arguments, dict):  # some harnesses send the object itself
                arguments = _dump(arguments)
            if arguments is not None and not isinstance(arguments, str):
                raise RequestError(f"{where}.arguments", f"{where}.arguments must be JSON text")
        else:
            text = _string(item, "input", where) or ""
            raw = call_id.endswith(RAW)
            call_id = call_id.removesuffix(RAW)
            arguments = text if raw else _dump({"input": text})
        function = {"name": flat_name(_string(item, "namespace", where), name), "arguments": arguments or ""}
        message = self._assistant("call", item)
        if message is not None:
            message.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _reference(self, item: Message, where: str) -> None:
        """An item of an earlier reply by its id. The whole reply is taken: its items are always sent together."""
        found = _OWN.fullmatch(_string(item, "id", where) or "")
        if found is None:
            raise RequestError(f"{where}.id", f"{where}: there is no item with the id {item.get('id')!r}")
        if self._open is None or self._reply != found[1]:
            self._open = {}
            self.messages.append(self._open)
        self._open.clear()
        self._open.update({"role": "assistant", "content": "", QUOTED: f"resp_{found[1]}"})
        self._reply = found[1]

    def _other(self, message: Message) -> None:
        self.messages.append(message)
        self._open = self._reply = None

    def _assistant(self, kind: str, item: Message) -> Message | None:
        """The message that an item of the model belongs to; None if the item is in it already, by reference."""
        found = _OWN.fullmatch(item["id"]) if isinstance(item.get("id"), str) else None
        reply = found[1] if found else None
        message = self._open
        if message is not None and reply is not None and self._reply is not None:
            goes_on = reply == self._reply
        elif message is not None:
            # A reply begins with its reasoning and never has two texts next to each other.
            goes_on = QUOTED in message or not (kind == "reasoning" or (kind == self._last == "text"))
        else:
            goes_on = False
        if not goes_on:
            message = self._open = {"role": "assistant", "content": ""}
            self._reply = None
            self.messages.append(message)
        self._reply = reply or self._reply
        self._last = kind
        assert message is not None
        return None if QUOTED in message else message


def _text(content: Any, where: str, between: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(where, f"{where} must be a text or a list of parts")
    texts = []
    for index, part in enumerate(content):
        here = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _MEDIA:
            raise RequestError(here, f"{here}: this model reads text only, it cannot take a part of type {kind!r}")
        text = None
        if kind in ("refusal", "encrypted_content"):  # the latter is what our model wrote: nobody has encrypted it
            text = part.get(kind)
        elif kind in _TEXT_PARTS:
            text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(here, f"{here} must be a part with text, such as input_text; it is {kind!r}")
        texts.append(text)
    return between.join(texts)


def _reasoning(item: Message, where: str) -> str:
    """What can be read of it: the reasoning itself, sent openly or sealed, before what is only a summary of it."""
    content = item.get("content")
    text = "" if content is None else _text(content, f"{where}.content", "")
    if text:
        return text
    sealed = _string(item, "encrypted_content", where) or ""
    if sealed.startswith(_SEALED):
        try:
            return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            name = f"{where}.encrypted_content"
            raise RequestError(name, f"{name} is not as it was sent: {error}") from error
    summary = item.get("summary")
    return "" if summary is None else _text(summary, f"{where}.summary", "\n\n")


def _string(item: Message, name: str, where: str) -> str | None:
    value = item.get(name)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{where}.{name}", f"{where}.{name} must be a string")
    return value


def _dump(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
