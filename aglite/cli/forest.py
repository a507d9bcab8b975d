"""The calls of a rollout as the forest that its samples are paths of, token by token: pure functions to lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

WIDTH = 118


def forest(calls: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line a call, under the call whose recorded tokens it continues: what it adds, why it does not continue
    anything, and the sample in which its tokens are trained."""
    numbers = {call["id"]: number for number, call in enumerate(calls, 1)}
    trained = {call_id: number for number, sample in enumerate(samples, 1) for call_id, here in sample["calls"] if here}
    children: dict[int | None, list[Mapping[str, Any]]] = {}
    for call in calls:
        children.setdefault(call["parent_id"] if call["parent_id"] in numbers else None, []).append(call)
    by_id = {call["id"]: call for call in calls}
    roots = children.get(None, [])
    yield f"forest: {len(calls)} calls in {len(roots)} trees, {len(samples)} samples"

    waiting = [(root, "  ", "", "") for root in reversed(roots)]  # as many levels as a conversation has turns
    while waiting:
        call, lead, branch, below = waiting.pop()
        fresh = call["prompt_tokens"] - kept(call, by_id)
        how = call["fork_cause"] or "continues"
        where = f"trained in sample {trained[call['id']]}" if call["id"] in trained else _untrained(call)
        yield f"{lead}{branch}call {numbers[call['id']]}  {how}: {fresh} + {call['sampled_tokens']} tokens, {where}"
        for later, child in enumerate(reversed(children.get(call["id"], []))):
            waiting.append((child, lead + below, "├─ " if later else "└─ ", "│  " if later else "   "))


def kept(call: Mapping[str, Any], by_id: Mapping[int, Mapping[str, Any]]) -> int:
    """How many tokens of a call's prompt are its parent's recorded ones."""
    parent = by_id.get(call["parent_id"])
    return 0 if parent is None else parent["prompt_tokens"] + parent["sampled_tokens"]


def call_tokens(
    call: Mapping[str, Any], by_id: Mapping[int, Mapping[str, Any]], texts: Mapping[str, str], indent: str
) -> Iterator[str]:
    """The tokens that a call adds to the forest: those of its prompt as numbers, then one line for each sampled one
    with its place, the policy version that sampled it, its log-probability, its id and its text."""
    start = kept(call, by_id)
    if start:
        yield f"{indent}{_span(0, start)}: recorded before"
    if fresh := call["prompt_ids"][start:]:
        yield from numbers(f"{_span(start, start + len(fresh))} prompt", fresh, indent)
    versions = [version for version, count in call["versions"] for _ in range(count)]
    for place, token in enumerate(call["response_ids"]):
        value = f"{call['logprobs'][place]:9.4f}" if call["logprobs"] else "        –"
        text = texts.get(str(token))
        shown = "" if text is None else f"  {text!r}"
        yield f"{indent}{call['prompt_tokens'] + place:>6}  v{versions[place]:<3}{value}  {token:>6}{shown}"


def sample_tokens(sample: Mapping[str, Any], indent: str) -> Iterator[str]:
    """The runs of a sample's tokens that are alike in mask and policy version, with the mean log-probability."""
    runs = groupby(range(len(sample["input_ids"])), key=lambda at: (sample["loss_mask"][at], sample["versions"][at]))
    for (mask, version), run in runs:
        places = list(run)
        span = _span(places[0], places[-1] + 1)
        if mask:
            mean = sum(sample["logprobs"][at] for at in places) / len(places)
            yield f"{indent}{span:>9}  mask 1  v{version}, mean logprob {mean:.4f}"
        else:
            yield f"{indent}{span:>9}  mask 0"


def numbers(name: str, values: Sequence[float], indent: str) -> Iterator[str]:
    """A long row of numbers, wrapped."""
    line = f"{indent}{name}:"
    for value in values:
        if len(line) + len(str(value)) >= WIDTH:
            yield line
            line = f"{indent}{indent}{value}"
        else:
            line += f" {value}"
    yield line


def _span(start: int, stop: int) -> str:
    return f"{start}–{stop - 1}" if stop - start > 1 else f"{start}"


def _untrained(call: Mapping[str, Any]) -> str:
    if not call["sampled_tokens"]:
        return "nothing sampled"
    return "not trained" if call["delivered"] else "no loss: its reply never reached the agent"
