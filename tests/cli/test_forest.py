"""The forest of a rollout's calls as lines."""

from __future__ import annotations

from typing import Any

from aglite.cli.forest import call_tokens, forest, numbers, sample_tokens


def call(id: int, parent: int | None, cause: str, prompt: int, sampled: int, **more: Any) -> dict[str, Any]:
    return {
        "id": id,
        "parent_id": parent,
        "fork_cause": cause,
        "prompt_tokens": prompt,
        "sampled_tokens": sampled,
        "delivered": True,
        **more,
    }


def test_sub_agents_branches_and_lost_replies() -> None:
    calls = [
        call(11, None, "first", 5, 2),
        call(12, None, "new_thread", 4, 1),
        call(13, 11, "", 9, 3),
        call(14, 12, "", 6, 2, delivered=False),
        call(15, 11, "", 8, 1),
        call(16, 13, "", 12, 0),
    ]
    samples = [
        {"calls": [[12, 1]]},
        {"calls": [[11, 1], [15, 1]]},
        {"calls": [[11, 0], [13, 1]]},
    ]
    assert list(forest(calls, samples)) == [
        "forest: 6 calls in 2 trees, 3 samples",
        "  call 1  first: 5 + 2 tokens, trained in sample 2",
        "  ├─ call 3  continues: 2 + 3 tokens, trained in sample 3",
        "  │  └─ call 6  continues: 0 + 0 tokens, nothing sampled",
        "  └─ call 5  continues: 1 + 1 tokens, trained in sample 2",
        "  call 2  new_thread: 4 + 1 tokens, trained in sample 1",
        "  └─ call 4  continues: 1 + 2 tokens, no loss: its reply never reached the agent",
    ]


def test_a_conversation_may_have_more_turns_than_a_stack_has_room_for() -> None:
    calls = [call(1, None, "first", 1, 1), *(call(id, id - 1, "", 2 * id - 1, 1) for id in range(2, 2001))]
    lines = list(forest(calls, []))
    assert len(lines) == 2001 and lines[-1].lstrip().startswith("└─ call 2000  continues: 1 + 1 tokens")


def test_sampled_tokens_have_place_version_logprob_id_and_text() -> None:
    parent = call(1, None, "first", 2, 1)
    tokens = {"prompt_ids": [7, 8, 9, 10], "response_ids": [11, 12], "logprobs": [-0.25, -1.5]}
    child = call(2, 1, "", 4, 2, **tokens, versions=[[3, 1], [4, 1]])
    lines = list(call_tokens(child, {1: parent, 2: child}, {"11": " a"}, "  "))
    assert [" ".join(line.split()) for line in lines] == [
        "0–2: recorded before",
        "3 prompt: 10",
        "4 v3 -0.2500 11 ' a'",
        "5 v4 -1.5000 12",
    ]
    silent = call(3, None, "first", 1, 1, prompt_ids=[7], response_ids=[8], logprobs=[], versions=[[0, 1]])
    assert "–" in list(call_tokens(silent, {3: silent}, {}, ""))[-1]


def test_a_sample_is_told_in_runs() -> None:
    sample = {
        "input_ids": [1, 2, 3, 4, 5],
        "loss_mask": [0, 0, 1, 1, 1],
        "versions": [-1, -1, 2, 2, 3],
        "logprobs": [0, 0, -1.0, -2.0, -0.5],
    }
    assert [" ".join(line.split()) for line in sample_tokens(sample, "")] == [
        "0–1 mask 0",
        "2–3 mask 1 v2, mean logprob -1.5000",
        "4 mask 1 v3, mean logprob -0.5000",
    ]


def test_long_rows_of_numbers_are_wrapped() -> None:
    lines = list(numbers("prompt", range(100), "    "))
    assert len(lines) > 2 and max(map(len, lines)) < 120
    assert [int(text) for line in lines for text in line.replace("prompt:", "").split()] == list(range(100))
