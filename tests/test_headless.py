from __future__ import annotations

import time
from typing import Any

import pytest
from fake_daemon import event, step_event

from aglite.conversation import added_messages, message_lines
from aglite.headless import line


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_lines() -> None:
    assert line(event(1, 0, "phase", "rollout")) == "14:13:20  phase       rollout"
    assert line(step_event(2, 0, 3, 0.5)) == (
        "14:13:20  step        step 3 · reward 0.500 ± 0.31 · 24 rollouts · 1180 tokens trained · kl 4.1e-04"
        " · update 0:27"
    )
    assert line(event(3, 0, "run", "no disk\n-> free some", "error")) == (
        "14:13:20  run         error: no disk\n                      -> free some"
    )


def test_forks_of_a_step_are_named_where_conversations_broke() -> None:
    step = step_event(1, 0, 3, 0.5)
    step["data"]["forks"] = {"continued": 9, "first": 4, "new_thread": 0, "edited": 0, "template": 0, "retokenised": 0}
    assert "forks" not in (line(step) or "")
    step["data"]["forks"] |= {"edited": 2, "retokenised": 1}
    assert " · forks: 2 edited, 1 retokenised · " in (line(step) or "")


def test_a_step_that_changed_nothing_says_why() -> None:
    skipped = step_event(1, 0, 3, 0.5)
    skipped["data"] |= {"state": "skipped", "groups": 4, "zero_advantage_groups": 3}
    assert " step 3 skipped · " in (line(skipped) or "")
    skipped["data"]["zero_advantage_groups"] = 4
    assert " step 3 skipped (in every group all rewards are equal) · " in (line(skipped) or "")


def test_single_rollouts_are_told_only_when_something_is_wrong() -> None:
    assert line(event(1, 0, "rollout", "r-1 done")) is None
    assert line(event(1, 0, "rollout", "r-1 lost", "warning")) == "14:13:20  rollout     warning: r-1 lost"


def test_a_conversation_is_told_once() -> None:
    ask, answer, again = (
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))
    )
    calls = [[ask, answer], [ask, answer, again], [again], [ask, answer, again, answer]]
    assert added_messages(calls) == [[ask, answer], [again], [again], [answer]]


def test_the_work_for_a_long_conversation_does_not_grow_with_its_third_power() -> None:
    compared = 0

    class Message(dict):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return dict.__eq__(self, other)

    turns = 60
    calls = [[Message(role="user", content=str(n)) for n in range(2 * turn)] for turn in range(1, turns + 1)]
    assert [len(messages) for messages in added_messages(calls)] == [2] * turns
    assert compared <= 2 * turns**2


def test_messages_with_parts_and_tool_calls() -> None:
    message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "one\ntwo"}, {"type": "image_url"}],
        "tool_calls": [{"function": {"name": "bash", "arguments": '{"command": "ls"}'}}],
    }
    assert message_lines(message, "  ") == [
        "  assistant: one",
        "             two",
        "             [image_url]",
        '             -> bash({"command": "ls"})',
    ]
    assert message_lines({"role": "user", "content": None}) == ["user: "]
