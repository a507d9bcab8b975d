"""What made a call fork: the first difference between its prompt and what was recorded before. Pure, but for reading
the tokenizer's tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aglite.conversation import message_text
from aglite.gateway.arguments import canonical
from aglite.units import BROKEN

if TYPE_CHECKING:
    from aglite.gateway.tokenizer import TextTokenizer
    from aglite.store.records import StoredCall

Message = dict[str, Any]
Conversation = tuple[list[Message], Message | None]
"""The messages of a call's prompt, and its reply if it has one."""

AROUND = 40
"""Characters shown on either side of a difference."""
MIDDLE = 160
"""Characters shown of the difference itself."""
CONTEXT = 3
"""Tokens shown before a difference."""
SHOWN = 8
"""Tokens shown of a difference."""
MEETS = 32
"""Tokens within which two ways to split the same text have to meet again."""


def fork_diffs(
    calls: Sequence[StoredCall], conversations: Mapping[int, Conversation], tokenizer: TextTokenizer | None
) -> dict[int, dict[str, Any]]:
    """For each call of an attempt that broke off a recorded conversation (`edited`, `template`, `retokenised`), by id:

    - `against`: the call it is compared with, the one its messages follow longest;
    - `message`: the first message that differs, `{"index", "roles", "before", "after"}`, or None; `roles` and the two
      texts are of that call and of this one, a text as [what both begin with, the part that differs, what follows];
    - `tools`: the names of the tools of either, where these differ, or None;
    - `tokens`: the first token that differs, `{"position", "context", "before", "after", "same_text", "reply_of",
      "message"}`, or None; tokens are [id, text] (text None without `tokenizer`), `same_text` says that both spell the
      same text, `reply_of` which call sampled the tokens that are gone, and `message` that reply's index.
    """
    by_id = {call.id: call for call in calls}
    diffs: dict[int, dict[str, Any]] = {}
    for call in calls:
        if call.fork_cause not in BROKEN:
            continue
        other = _compared(call, calls, by_id, conversations)
        if other is None:
            continue
        same = _same_key if call.fork_cause == "edited" else _same_text
        tools = [_tools(other), _tools(call)]
        diffs[call.id] = {
            "against": other.id,
            "message": _message_diff(_whole(conversations[other.id]), conversations[call.id][0], same),
            "tools": tools if tools[0] != tools[1] else None,
            "tokens": _token_diff(call, other, by_id, conversations, tokenizer),
        }
    return diffs


def diff_lines(diff: Mapping[str, Any], numbers: Mapping[int, int]) -> Iterator[str]:
    """A fork's difference as lines of text; `numbers` are those that calls are shown with."""
    message, tools, tokens = diff["message"], diff["tools"], diff["tokens"]
    yield f"the first difference to call {numbers.get(diff['against'], diff['against'])}:"
    if tools is not None:
        for sign, names in zip("-+", tools, strict=True):
            yield f"  {sign} tools: {', '.join(names) or 'none'}"
    if message is not None:
        yield f"  message {message['index'] + 1}"
        for sign, role, parts in zip("-+", message["roles"], (message["before"], message["after"]), strict=True):
            start, middle, end = (_one_line(part) for part in parts)
            yield f"  {sign} {role}: {start}⟦{middle}⟧{end}"
    if tokens is not None:
        where = ""
        if tokens["reply_of"] is not None:
            reply = numbers.get(tokens["reply_of"], tokens["reply_of"])
            where = f", in the reply of call {reply}"
            where += "" if tokens["message"] is None else f" (message {tokens['message'] + 1})"
        split = ": the same text, split differently" if tokens["same_text"] else ""
        yield f"  token {tokens['position'] + 1}{where}{split}"
        for sign, side in zip("-+", (tokens["before"], tokens["after"]), strict=True):
            yield f"  {sign} {_spelled(tokens['context'])}⟦{_spelled(side) or 'end of the prompt'}⟧"


def _compared(
    call: StoredCall,
    calls: Sequence[StoredCall],
    by_id: Mapping[int, StoredCall],
    conversations: Mapping[int, Conversation],
) -> StoredCall | None:
    """The call that this one would have continued: the one it was matched with, or for an edited conversation the one
    that has most messages in common with it, the latest of those."""
    if call.fork_cause != "edited":
        return by_id.get(call.matched_id or 0)
    messages = conversations[call.id][0]
    earlier = [other for other in calls if other.finished_at <= call.started_at and other.id != call.id]
    if not messages or not earlier:  # the run keeps tokens only
        return by_id.get(call.matched_id or call.base_id or 0)
    return max(earlier, key=lambda other: (_shared(_whole(conversations[other.id]), messages), other.id))


def _shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a is not b and not _same_key(a, b):
            return index
    return min(len(one), len(other))


def _whole(conversation: Conversation) -> list[Message]:
    messages, reply = conversation
    return [*messages, reply] if reply else messages


# messages


def _message_diff(before: Sequence[Message], after: Sequence[Message], same: Any) -> dict[str, Any] | None:
    for index, (was, now) in enumerate(zip(before, after, strict=False)):
        if was is not now and not same(was, now):
            texts = _excerpts(_text(was), _text(now))
            return {"index": index, "roles": [was["role"], now["role"]], "before": texts[0], "after": texts[1]}
    return None


def _same_key(was: Message, now: Message) -> bool:
    """Whether the gateway takes them for the same message: white space around an assistant's text, the form of
    arguments and dropped reasoning make no difference to it."""
    if was["role"] != now["role"]:
        return False
    if was["role"] != "assistant":
        return was.get("content") == now.get("content")
    reasoning = now.get("reasoning_content")
    return (
        (was.get("content") or "").strip() == (now.get("content") or "").strip()
        and (not reasoning or reasoning == was.get("reasoning_content"))
        and _calls(was) == _calls(now)
    )


def _same_text(was: Message, now: Message) -> bool:
    return was["role"] == now["role"] and _text(was) == _text(now)


def _calls(message: Message) -> list[tuple[str, Any]]:
    functions = (call["function"] for call in message.get("tool_calls") or ())
    return [(function["name"], canonical(function["arguments"])) for function in functions]


def _text(message: Message) -> str:
    reasoning = message.get("reasoning_content")
    return (f"(reasoning: {reasoning}) " if reasoning else "") + message_text(message)


def _tools(call: StoredCall) -> list[str]:
    return (call.request.get("asked") or {}).get("tools") or []


def _excerpts(was: str, now: str) -> tuple[list[str], list[str]]:
    """Both texts as [common beginning, what differs in whole words, common end], long parts cut."""
    start = _common(was, now)
    start -= len(re.search(r"\w*$", was[:start])[0])  # type: ignore[index]  # matches always
    rest = _common(was[start:][::-1], now[start:][::-1])
    if rest:
        rest -= len(re.match(r"\w*", was[len(was) - rest :])[0])  # type: ignore[index]
    head, tail = was[:start], was[len(was) - rest :] if rest else ""
    head = head if len(head) <= AROUND else f"…{head[-AROUND:]}"
    tail = tail if len(tail) <= AROUND else f"{tail[:AROUND]}…"
    return [head, _cut(was[start : len(was) - rest]), tail], [head, _cut(now[start : len(now) - rest]), tail]


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of what two sequences begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _cut(text: str) -> str:
    return text if len(text) <= MIDDLE else f"{text[:MIDDLE]}… ({len(text) - MIDDLE} more characters)"


def _one_line(text: str) -> str:
    return text.replace("\r", "").replace("\n", "⏎").replace("\t", "⇥")


# tokens


def _token_diff(
    call: StoredCall,
    other: StoredCall,
    by_id: Mapping[int, StoredCall],
    conversations: Mapping[int, Conversation],
    tokenizer: TextTokenizer | None,
) -> dict[str, Any] | None:
    was, now = other.prompt_ids + other.response_ids, call.prompt_ids
    at = _common(was, now)
    if at == len(was):
        return None
    lengths = _meeting(was[at : at + MEETS], now[at : at + MEETS], tokenizer)
    before, after = lengths or (SHOWN, SHOWN)
    sampled = _sampler(other, at, by_id)
    asked = conversations[sampled.id][0] if sampled else []

    def spelled(ids: Sequence[int]) -> list[list[Any]]:
        return [[token_id, tokenizer.token_text(token_id) if tokenizer else None] for token_id in ids]

    return {
        "position": at,
        "context": spelled(now[max(0, at - CONTEXT) : at]),
        "before": spelled(was[at : at + before]),
        "after": spelled(now[at : at + after]),
        "same_text": lengths is not None,
        "reply_of": sampled.id if sampled else None,
        "message": len(asked) or None,  # none where the run keeps tokens only
    }


def _meeting(was: Sequence[int], now: Sequence[int], tokenizer: TextTokenizer | None) -> tuple[int, int] | None:
    """How many tokens of either spell the same text, up to where both go on with the same token; None if they do not
    spell the same."""
    if tokenizer is None or not was or not now:
        return None
    left, right = tokenizer.token_bytes(was[0]), tokenizer.token_bytes(now[0])
    i = j = 1
    met = None
    while True:
        if left == right:
            met = i, j
            if was[i : i + 1] == now[j : j + 1]:
                return met
        if len(left) <= len(right) and right.startswith(left) and i < len(was):
            left += tokenizer.token_bytes(was[i])
            i += 1
        elif len(right) < len(left) and left.startswith(right) and j < len(now):
            right += tokenizer.token_bytes(now[j])
            j += 1
        else:
            return met


def _sampler(call: StoredCall | None, position: int, by_id: Mapping[int, StoredCall]) -> StoredCall | None:
    """The call whose sampling gave the token at `position` of `call`'s sequence; None for a token of a message."""
    while call is not None:
        if position >= len(call.prompt_ids):
            return call
        parent = by_id.get(call.parent_id or 0)
        if parent is None or position >= len(parent.prompt_ids) + len(parent.response_ids):
            return None
        call = parent
    return None


def _spelled(tokens: Sequence[Sequence[Any]]) -> str:
    """Tokens as text with a bar after each; ids where there is no tokenizer."""
    return "".join(f"{token_id if text is None else _one_line(text)}│" for token_id, text in tokens)
