"""Matching requests against recorded calls, in pure form: a model of agents against the real thing."""

from __future__ import annotations

import json
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aglite.gateway.continuation import Conversations
from aglite.gateway.replies import Reply
from aglite.gateway.tokentree import TokenTree


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def call(name: str, arguments: str, call_id: str = "c1") -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Rollout:
    """A rollout whose replies are given as text and tokenised oddly, as a model would."""

    def __init__(self, renderer, mode: str = "exact") -> None:
        self.renderer = renderer
        self.conversations = Conversations(renderer, mode)
        self.recorded: list[tuple[list[int], list[int]]] = []
        self.calls = []
        self.plans = []

    def ask(self, messages: list, reply: str | dict = "ok", tools=(), ends: bool = True):
        message = assistant(reply) if isinstance(reply, str) else reply
        plan = self.conversations.plan(list(messages), tools)
        text = message["content"]
        ids = [token for char in text for token in self.renderer.tokenizer.encode_plain(char)]
        ids += [self.renderer.stop_ids[0]] if ends else []
        recorded = self.conversations.record(
            plan, array("i", ids).tobytes(), message, len(self.recorded) + 1, delivered=True, continuable=True
        )
        self.recorded.append((plan.prompt_ids.tolist(), ids))
        self.calls.append(recorded)
        self.plans.append(plan)
        return plan

    def check(self) -> None:
        """What the store would rebuild, and the parents, against a plain search."""
        rebuilt: list[list[int]] = []
        for index, plan in enumerate(self.plans):
            prompt, ids = self.recorded[index]
            base = rebuilt[plan.base.id - 1][: plan.base_len] if plan.base else []
            assert base + plan.new_prompt_ids.tolist() == prompt
            rebuilt.append(prompt + ids)
            whole = [seen for seen in rebuilt[:-1] if prompt[: len(seen)] == seen]
            longest = max(map(len, whole), default=None)
            expected = next(
                (i + 1 for i, seen in enumerate(rebuilt[:-1]) if seen in whole and len(seen) == longest), None
            )
            assert (plan.parent.id if plan.parent else None) == expected


def test_appending_continues(renderer) -> None:
    rollout = Rollout(renderer)
    messages = [user("a")]
    for turn in range(5):
        plan = rollout.ask(messages, f"reply {turn}", ends=turn % 2 == 0)
        messages += [assistant(f"reply {turn}"), user(f"more {turn}")]
        assert plan.cause == ("" if turn else "first")
    rollout.check()
    assert [plan.parent.id if plan.parent else 0 for plan in rollout.plans] == [0, 1, 2, 3, 4]
    assert all(len(plan.new_messages) == 1 for plan in rollout.plans)


def test_what_does_not_reach_the_prompt_does_not_matter(renderer) -> None:
    rollout = Rollout(renderer)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": 1, "b": 2}}}]
    turned = [{"function": {"parameters": {"b": 2, "a": 1}, "name": "f"}, "type": "function"}]
    reply = assistant("look ", tool_calls=[call("f", '{"x": 1, "y": [1, 2]}')], reasoning_content="because I must")
    rollout.ask([user("a")], reply, tools)
    back = assistant("look", tool_calls=[call("f", json.dumps({"y": [1, 2], "x": 1}, indent=2), "other")])
    for message in (back, {**back, "reasoning_content": "because I must"}):
        plan = rollout.ask([user("a"), message, {"role": "tool", "content": "1", "tool_call_id": "other"}], "b", turned)
        assert plan.cause == "" and plan.matched.id == 1
    changed = {**back, "reasoning_content": "because I may"}
    assert rollout.ask([user("a"), changed, user("b")], "x", turned).cause == "edited"
    rollout.check()


def test_causes(renderer) -> None:
    rollout = Rollout(renderer)
    system = {"role": "system", "content": "s"}
    assert rollout.ask([system, user("task")], "one").cause == "first"
    assert rollout.ask([system, user("task"), assistant("one"), user("go")], "two").cause == ""
    assert rollout.ask([system, user("task")], "other").cause == "first", "another sample of the same prompt"
    assert rollout.ask([user("give a title")], "t").cause == "new_thread"
    assert rollout.ask([user("give a title"), assistant("t"), user("shorter")], "u").cause == ""
    edited = [system, user("task"), assistant("one"), user("go"), assistant("rewritten"), user("on")]
    plan = rollout.ask(edited, "x")
    assert plan.cause == "edited" and plan.matched.id == 1
    assert rollout.ask([system, user("summary of all that"), user("go")], "y").cause == "edited", "compacted"
    assert rollout.ask([system, user("task")], "z", [{"type": "function", "function": {"name": "f"}}]).cause == "edited"
    rollout.check()


def test_other_branches_of_a_conversation_continue_it(renderer) -> None:
    rollout = Rollout(renderer)
    rollout.ask([user("a")], "b")
    for text in ("c", "d", "c"):
        plan = rollout.ask([user("a"), assistant("b"), user(text)], "e")
        assert plan.cause == "" and plan.parent.id == 1
    plan = rollout.ask([user("a"), assistant("b"), assistant("said by the harness"), user("f")], "g")
    assert plan.cause == "" and plan.parent.id == 1
    rollout.check()


def test_a_reply_without_end_is_nobodys_parent(renderer) -> None:
    rollout = Rollout(renderer)
    plan = rollout.conversations.plan([user("a")])
    rollout.conversations.record(plan, b"", None, 1, delivered=False, continuable=False)
    again = rollout.conversations.plan([user("a")])
    assert again.parent is None and again.base.id == 1 and len(again.new_prompt_ids) == 0
    assert again.cause == "first", "asking once more after a failure edits nothing"
    rollout.conversations.record(again, b"", None, 2, delivered=False, continuable=False)
    other = rollout.conversations.plan([user("a title, please")])
    rollout.conversations.record(other, b"", None, 3, delivered=False, continuable=False)
    assert rollout.conversations.plan([user("a title, please")]).cause == "new_thread"
    assert rollout.conversations.plan([user("a"), user("b")]).cause == "edited"


def test_rerender_names_what_it_breaks(renderer) -> None:
    rollout = Rollout(renderer, "rerender")
    rollout.ask([user("a")], "hello world")
    assert rollout.ask([user("a"), assistant("hello world"), user("b")], "x").cause == "retokenised"
    rollout.ask([user("c")], assistant("x", reasoning_content="hm"))
    rollout.check()
    one = Rollout(renderer, "rerender")
    one.ask([user("a")], "x")
    assert one.ask([user("a"), assistant("x"), user("b")]).cause == "", "these tokens come out the same"
    cut = Rollout(renderer, "rerender")
    cut.ask([user("a")], assistant("x "))
    assert cut.ask([user("a"), assistant("x"), user("b")]).cause == "template", "the text itself differs"


def test_undelivered_calls_that_are_continued(renderer) -> None:
    rollout = Rollout(renderer)
    rollout.ask([user("a")], "b")
    rollout.ask([user("a"), assistant("b"), user("c")], "d")
    for recorded in rollout.calls:
        recorded.delivered = False
    plan = rollout.conversations.plan([user("a"), assistant("b"), user("c"), assistant("d"), user("e")])
    assert rollout.conversations.undelivered(plan.matched) == [2, 1]
    assert rollout.conversations.undelivered(plan.matched) == []


WORDS = st.sampled_from(["a", "b", "hello", "wörld"])
STEPS = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from(["append", "again", "edit", "new", "insert"]), WORDS, WORDS),
    max_size=14,
)


@settings(max_examples=150)
@given(STEPS, st.sampled_from(["exact", "rerender"]))
def test_any_agent(renderer, steps: list, mode: str) -> None:
    """Threads that grow, repeat, are edited, interleave: every stored prompt rebuilds, every parent is the longest
    prefix, and every request that only appends keeps the recorded tokens."""
    rollout = Rollout(renderer, mode)
    histories: list[list[dict]] = [[user("start")]]
    owners: list[int | None] = [None]
    for pick, kind, text, reply in steps:
        at = pick % len(histories)
        history, owner = histories[at], owners[at]
        if kind == "new":
            history, owner = [user(text)], None
        elif kind == "edit" and len(history) > 2:
            history, owner = [*history[:1], assistant(text + "!"), *history[2:]], None
        elif kind == "insert":
            history, owner = [*history, assistant("between"), user(text)], owner
        plan = rollout.ask(history, reply)
        if owner is not None and mode == "exact":
            prompt, ids = rollout.recorded[owner]
            whole = prompt + ids
            # An equal reply sampled twice has two equally good owners; the tokens are the same.
            assert plan.prompt_ids[: len(whole)].tolist() == whole
            assert plan.cause in ("", "edited")
        if kind != "again":
            histories.append([*history, assistant(reply), user(text)])
            owners.append(len(rollout.recorded) - 1)
    rollout.check()


@settings(max_examples=300)
@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12))
def test_the_tree_of_tokens(sequences: list[list[int]]) -> None:
    tree, seen = TokenTree(), []
    for number, ids in enumerate(sequences):
        data = array("i", ids).tobytes()
        found = tree.match(data)
        common = max((len(_prefix(ids, other)) for other in seen), default=0)
        assert found.length == common
        if common:
            assert _prefix(ids, seen[found.owner]) == ids[:common]
        ends = [i for i, other in enumerate(seen) if other and ids[: len(other)] == other]
        longest = max((len(seen[i]) for i in ends), default=0)
        assert found.end == next((i for i in ends if len(seen[i]) == longest), None)
        node = tree.insert(data, number)
        if ids and node.end is None:
            node.end = number
        assert TokenTree.sequence(node) == data
        seen.append(ids)
    for ids in seen:
        data = array("i", ids).tobytes()
        assert tree.match(data).length == len(ids)


def _prefix(one: list[int], other: list[int]) -> list[int]:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return one[:length]


def test_long_conversations_stay_cheap(renderer) -> None:
    """200 turns and 100,000 tokens: the work of a turn does not grow with Python work per token."""
    import time

    rng = random.Random(0)
    rollout = Conversations(renderer, "exact")
    messages = [user("start")]
    took = []
    for turn in range(200):
        began = time.process_time()
        plan = rollout.plan(messages)
        response = array("i", [rng.randrange(3, 500) for _ in range(500)] + [2])
        reply = assistant(f"reply {turn}")
        rollout.record(plan, response.tobytes(), reply, turn + 1, delivered=True, continuable=True)
        took.append(time.process_time() - began)
        messages += [reply, user(f"more {turn}")]
    assert plan.prompt_len > 100_000
    assert sorted(took[150:])[25] < 0.02


def test_pieces_of_a_reply_rebuild_it() -> None:
    reply = Reply("text", "why", [{"id": "1", "name": "f", "arguments": "{}"}])
    again = Reply()
    again.add(reply.pieces())
    assert again == reply


@pytest.mark.parametrize("arguments", ["{", "", "[1]", '{"a": 1}'])
def test_arguments_that_are_no_json_match_as_text(renderer, arguments: str) -> None:
    rollout = Rollout(renderer)
    tools = [{"type": "function", "function": {"name": "f"}}]
    reply = assistant("", tool_calls=[call("f", arguments)])
    rollout.ask([user("a")], reply, tools)
    assert rollout.ask([user("a"), reply, {"role": "tool", "content": "x"}], "y", tools).cause == ""
