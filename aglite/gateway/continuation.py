"""Which recorded call a request continues, and the exact tokens of its prompt. Pure: no I/O.

A harness sends its history as text. The messages of a request are looked up in a tree of all messages of the rollout;
where they run through a recorded reply, the prompt is the recorded tokens plus the tokens of what is new.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from aglite.gateway.arguments import canonical, read_arguments
from aglite.gateway.dialects.base import RequestError
from aglite.gateway.renderers import ChatRenderer
from aglite.gateway.tokentree import Node, TokenTree

Message = dict[str, Any]
ForkCause = Literal["", "first", "new_thread", "edited", "template", "retokenised"]


_TEXT = b"text"
"""Root of the prompts that are plain text: no list of tools is written so."""


class Turn:
    """A point in the tree of messages: the list of messages from its root."""

    __slots__ = ("calls", "cause", "children", "depth", "parent", "replies")

    def __init__(self, parent: Turn | None) -> None:
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 0
        self.children: dict[Any, Turn] = {}
        self.calls: list[Call] = []  # requests that asked with exactly these messages
        self.replies: list[Call] = []  # calls whose reply is the last of these messages
        self.cause: ForkCause | None = None  # of the first request with exactly these messages, answered or not


class Call:
    """A recorded call, as much of it as later requests need."""

    __slots__ = ("cause", "delivered", "id", "matched", "node", "prompt_len", "reply_turn", "turn")

    def __init__(self, plan: Plan, call_id: int, delivered: bool) -> None:
        self.id = call_id
        self.delivered = delivered
        self.cause: ForkCause = plan.cause
        self.matched: Call | None = plan.matched
        self.prompt_len = plan.prompt_len
        self.node: Node
        self.turn: Turn
        self.reply_turn: Turn | None = None


@dataclass(slots=True)
class Plan:
    """The prompt of a request and where it comes from. `base`, `base_len`, `base_messages`: what the store has."""

    prompt: bytes
    """Token ids as native int32."""
    cause: ForkCause
    matched: Call | None
    parent: Call | None
    base: Call | None
    base_len: int
    base_messages: int
    messages: Sequence[Message]
    tools_key: bytes
    keys: list[Any]
    start: Node | None = None
    """Where in the tree of tokens the base ends, if the whole of it is continued."""
    text: str | None = None
    """The whole prompt as text, in text completion."""

    @property
    def prompt_len(self) -> int:
        return len(self.prompt) // 4

    @property
    def prompt_ids(self) -> array:
        return array("i", self.prompt)

    @property
    def new_prompt_ids(self) -> array:
        return array("i", self.prompt[self.base_len * 4 :])

    @property
    def new_messages(self) -> Sequence[Message]:
        return self.messages[self.base_messages :]


class Conversations:
    """All calls of one attempt of a rollout. Sub-agents interleave freely."""

    def __init__(self, renderer: ChatRenderer, mode: Literal["exact", "rerender"]) -> None:
        self._renderer = renderer
        self._exact = mode == "exact"
        self._roots: dict[bytes, Turn] = {}
        self._tokens = TokenTree()
        self._known: set[Any] = set()
        self._arguments: dict[str, Any] = {}
        self._unreadable: dict[str, Any] = {}
        self._any = False
        self._texts: dict[int, dict[bytes, tuple[Sequence[Message], Call]]] = {}

    def plan(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Plan:
        """Match a request, in normal form, against what is recorded and make its prompt."""
        tools_key = orjson.dumps(tools, option=orjson.OPT_SORT_KEYS) if tools else b""
        keys = [self._key(message) for message in messages]
        path, same = self._walk(tools_key, keys)
        if same is not None:
            prompt = TokenTree.sequence(same.node)[: same.prompt_len * 4]
            return self._placed(prompt, same.cause, same.matched, None, messages, tools_key, keys, path)
        matched = next((turn.replies[-1] for turn in reversed(path) if turn.replies), None)
        if matched is None:
            prompt = self._render(messages, tools)
            asked = path[-1].cause if len(path) > len(keys) else None
            fork = self._unmatched(keys) if asked is None else asked
            return self._placed(prompt, fork, None, None, messages, tools_key, keys, path)
        reply_turn = matched.reply_turn
        assert reply_turn is not None
        new = messages[reply_turn.depth :]
        end = path[-1]
        edited = end.depth < len(keys) and messages[end.depth]["role"] == "assistant" and bool(end.calls)
        recorded = TokenTree.sequence(matched.node)
        if self._exact:
            before, response = recorded[: matched.prompt_len * 4], recorded[matched.prompt_len * 4 :]
            added = self._renderer.bridge(array("i", before), array("i", response), new, tools)
            if added is not None:
                prompt = recorded + array("i", added).tobytes()
                cause: ForkCause = "edited" if edited else ""
                return self._placed(prompt, cause, matched, matched, messages, tools_key, keys, path)
        prompt = self._render(messages, tools)
        cause = "edited" if edited else self._difference(recorded, prompt)
        return self._placed(prompt, cause, matched, None, messages, tools_key, keys, path)

    def plan_text(self, prompt: str | Sequence[int]) -> Plan:
        """The same for text completion. A text that begins with a recorded prompt and its reply continues those tokens;
        an end of turn that the model sampled is no text and so not continued. Token ids are taken as they are. Raises
        RequestError for ids that the model has not."""
        tokenizer = self._renderer.tokenizer
        if not isinstance(prompt, str) and max(prompt) >= tokenizer.vocab_size:
            raise RequestError(
                "prompt", f"prompt has the token id {max(prompt)}, the model has {tokenizer.vocab_size} tokens"
            )
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        said, messages, matched = self._said(text)
        rest = text[said:]
        messages = [*messages, {"role": "text", "content": rest}]
        keys = [self._key(message) for message in messages]
        path, _ = self._walk(_TEXT, keys)
        if not isinstance(prompt, str):
            data = array("i", prompt).tobytes()
        elif matched is not None and self._exact:
            recorded = array("i", TokenTree.sequence(matched.node))
            if recorded[-1] in self._renderer.stop_ids:
                recorded.pop()
            data = (recorded + array("i", tokenizer.encode(rest))).tobytes()
        else:
            data = array("i", tokenizer.encode_prompt(text)).tobytes()
        cause: ForkCause = "" if matched is not None else ("new_thread" if self._any else "first")
        plan = self._placed(data, cause, matched, None, messages, _TEXT, keys, path)
        plan.text = text
        return plan

    def _said(self, text: str) -> tuple[int, Sequence[Message], Call | None]:
        """The longest recorded prompt with its reply that a text begins with: its length, its messages, its call."""
        found: tuple[int, Sequence[Message], Call | None] = (0, [], None)
        digest, at = _hash(""), 0
        for length in sorted(self._texts):  # one walk, and no text is kept: each has all the earlier ones in it
            if length > len(text):
                break
            digest.update(text[at:length].encode())
            at = length
            known = self._texts[length].get(digest.digest())
            if known is not None:
                found = (length, *known)
        return found

    def record(
        self,
        plan: Plan,
        response: bytes,
        reply: Message | None,
        call_id: int,
        *,
        delivered: bool,
        continuable: bool,
    ) -> Call:
        """Take a call in under the id that the store gave it. One without a whole reply is no call's parent."""
        call = Call(plan, call_id, delivered)
        call.node = self._tokens.insert(plan.prompt + response, call, plan.start)
        self._any = True
        call.turn = self._turn(plan.tools_key, plan.keys)
        for message, key in zip(plan.messages[plan.base_messages :], plan.keys[plan.base_messages :], strict=True):
            self._remember(message, key)
        self._known.update(key for key in plan.keys if key[0] != "system")
        if call.turn.cause is None:
            call.turn.cause = plan.cause
        if not continuable:
            return call
        if call.node.end is None and call.node.length:  # without tokens all calls would be one
            call.node.end = call
        call.turn.calls.append(call)
        if reply is not None:
            self._note_unreadable(reply)
            key = self._key(reply)
            self._remember(reply, key)
            turn = self._child(call.turn, key)
            turn.replies.append(call)
            call.reply_turn = turn
            if plan.text is not None:
                said = plan.text + reply["content"]
                same_length = self._texts.setdefault(len(said), {})
                same_length.setdefault(_hash(said).digest(), ([*plan.messages, reply], call))
            if key[3]:  # harnesses that drop reasoning send the same message without it
                bare = (*key[:3], "")
                known = call.turn.children.get(bare)
                if known is None or not known.children:
                    call.turn.children[bare] = turn
        return call

    def undelivered(self, call: Call | None) -> list[int]:
        """Ids of the call and those before it that a continuation proves delivered; they are marked so here."""
        ids = []
        while call is not None:
            if not call.delivered:
                call.delivered = True
                ids.append(call.id)
            call = call.matched
        return ids

    # looking up

    def _walk(self, tools_key: bytes, keys: list[Any]) -> tuple[list[Turn], Call | None]:
        """The turns that the messages run through, and an earlier call that asked exactly this."""
        turn = self._roots.get(tools_key)
        if turn is None:
            return [Turn(None)], None
        path = [turn]
        for key in keys:
            turn = turn.children.get(key)
            if turn is None:
                return path, None
            path.append(turn)
        return path, path[-1].calls[0] if path[-1].calls else None

    def _placed(
        self,
        prompt: bytes,
        cause: ForkCause,
        matched: Call | None,
        continued: Call | None,
        messages: Sequence[Message],
        tools_key: bytes,
        keys: list[Any],
        path: list[Turn],
    ) -> Plan:
        if continued is not None:
            found = self._tokens.match(prompt, continued.node, continued)
            return Plan(
                prompt, cause, matched, found.end, continued, continued.node.length,
                continued.turn.depth + 1, messages, tools_key, keys, continued.node,
            )  # fmt: skip
        found = self._tokens.match(prompt)
        base: Call | None = found.owner if found.length else None
        shared = self._shared_messages(base, path) if base is not None else 0
        return Plan(prompt, cause, matched, found.end, base, found.length, shared, messages, tools_key, keys)

    @staticmethod
    def _shared_messages(base: Call, path: list[Turn]) -> int:
        """How many messages at the beginning the request has in common with the list of `base`, its reply included."""
        turn: Turn | None = base.reply_turn or base.turn
        while turn is not None and not (turn.depth < len(path) and path[turn.depth] is turn):
            turn = turn.parent
        return turn.depth if turn else 0

    def _unmatched(self, keys: list[Any]) -> ForkCause:
        if not self._any:
            return "first"
        return "edited" if any(key in self._known for key in keys) else "new_thread"

    def _difference(self, recorded: bytes, prompt: bytes) -> ForkCause:
        """Why a prompt that was rendered anew does not begin with the recorded tokens, or '' if it does."""
        if prompt.startswith(recorded):
            return ""
        decode = self._renderer.tokenizer.decode
        was, now = decode(array("i", recorded)), decode(array("i", prompt))
        return "retokenised" if now.startswith(was) else "template"

    def _render(self, messages: Sequence[Message], tools: Sequence[Message]) -> bytes:
        return array("i", self._renderer.render(messages, tools)).tobytes()

    # the tree of messages

    def _turn(self, tools_key: bytes, keys: list[Any]) -> Turn:
        turn = self._roots.get(tools_key)
        if turn is None:
            turn = self._roots[tools_key] = Turn(None)
        for key in keys:
            turn = self._child(turn, key)
        return turn

    @staticmethod
    def _child(turn: Turn, key: Any) -> Turn:
        child = turn.children.get(key)
        if child is None:
            child = turn.children[key] = Turn(turn)
        return child

    def _key(self, message: Message) -> Any:
        """What of a message can reach the prompt, in a form that is equal however it was serialised.

        White space around an assistant's text counts as re-serialisation: some harnesses strip it.
        """
        role = message["role"]
        if role != "assistant":
            named = message.get("tool_call_id") if self._renderer.keeps_call_ids else None
            return (role, message["content"], message.get("name"), named)
        calls = tuple(
            (
                call["function"]["name"],
                self._canonical(call["id"], call["function"]["arguments"]),
                call["id"] if self._renderer.keeps_call_ids else None,
            )
            for call in message.get("tool_calls") or ()
        )
        return (role, message["content"].strip(), calls, message.get("reasoning_content") or "")

    def _remember(self, message: Message, key: Any) -> None:
        """Keep the canonical form of arguments that will come again with every request; of recorded calls only, so that
        requests which are refused leave nothing behind."""
        for call, known in zip(message.get("tool_calls") or (), key[2] if key[0] == "assistant" else (), strict=True):
            if call["id"] not in self._unreadable:
                self._arguments[call["function"]["arguments"]] = known[1]

    def _note_unreadable(self, reply: Message) -> None:
        """Arguments that are no JSON object come back as whatever the harness made of them: such a call is known by its
        id alone."""
        for call in reply.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            if read_arguments(arguments) is None:
                self._unreadable[call["id"]] = canonical(arguments)
            else:
                self._unreadable.pop(call["id"], None)

    def _canonical(self, call_id: str, arguments: str) -> Any:
        unreadable = self._unreadable.get(call_id)
        if unreadable is not None:
            return unreadable
        known = self._arguments.get(arguments)
        return canonical(arguments) if known is None else known


def _hash(text: str) -> hashlib.blake2b:
    return hashlib.blake2b(text.encode(), digest_size=16)
