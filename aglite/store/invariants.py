"""What must hold between the rows of a run beyond what SQLite checks itself."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from typing import Any

from aglite.store.calls import digest_of, rebuild
from aglite.store.prune import COUNTED
from aglite.store.records import StoredCall, unpack_rows
from aglite.training.samples import join_path


def broken(db: sqlite3.Connection) -> Iterator[str]:
    """Every violation as one sentence: calls that do not rebuild, samples without their calls, changed messages."""
    messages = set()
    for row in db.execute("SELECT id, hash, body FROM messages"):
        messages.add(row["id"])
        if digest_of(row["body"]) != row["hash"]:
            yield f"message {row['id']} is not what its hash says"
        elif not _is_object(row["body"]):
            yield f"message {row['id']} is not a JSON object"
    yield from _calls_and_samples(db, messages)
    yield from _pruned(db)
    for row in db.execute("SELECT DISTINCT step FROM samples WHERE step NOT IN (SELECT step FROM steps)"):
        yield f"there are samples of step {row['step']}, but no such step"


def _calls_and_samples(db: sqlite3.Connection, messages: set[int]) -> Iterator[str]:
    for (rollout_id,) in db.execute("SELECT id FROM rollouts ORDER BY seq").fetchall():
        calls: dict[int, StoredCall] = {}
        lists: dict[int, int] = {}
        whole = True
        for row in db.execute("SELECT * FROM calls WHERE rollout_id = ? ORDER BY id", (rollout_id,)):
            problem = _call_problem(row, calls, lists, messages)
            if problem:
                whole = False
                yield f"call {row['id']} of rollout {rollout_id}: {problem}"
                continue
            calls[row["id"]] = rebuild(row, None if row["base_id"] is None else calls[row["base_id"]])
            lists[row["id"]] = (
                row["base_messages"] + len(unpack_rows(row["new_messages"])) + (row["reply_message"] is not None)
            )
        for row in db.execute("SELECT * FROM samples WHERE rollout_id = ?", (rollout_id,)):
            problem = _sample_problem(row, calls, whole)
            if problem:
                yield f"sample {row['id']} of rollout {rollout_id}: {problem}"


def _call_problem(
    row: sqlite3.Row, calls: dict[int, StoredCall], lists: dict[int, int], messages: set[int]
) -> str | None:
    sampled = row["response_len"]
    versions = json.loads(row["versions"])
    new_messages, prompt_ids = row["new_messages"], row["new_prompt_ids"]
    base_tokens = base_list = 0
    if row["base_id"] is not None:
        base = calls.get(row["base_id"])
        if base is None or base.attempt != row["attempt"]:
            return f"its base, call {row['base_id']}, is not a whole earlier call of its attempt"
        base_tokens, base_list = len(base.prompt_ids) + len(base.response_ids), lists[base.id]
    named = {row["parent_id"], row["matched_id"], row["retry_of"]} - {None}
    if not 0 <= row["base_len"] <= base_tokens:
        return f"it takes {row['base_len']} tokens of its base, which has {base_tokens}"
    if row["prompt_len"] * 4 != row["base_len"] * 4 + len(prompt_ids):
        return f"its prompt of {row['prompt_len']} tokens is not {row['base_len']} + {len(prompt_ids) // 4}"
    if sampled * 4 != len(row["response_ids"]):
        return f"it has {len(row['response_ids']) // 4} sampled tokens instead of {sampled}"
    if len(row["logprobs"]) not in (0, sampled * 4):
        return f"it has {len(row['logprobs']) // 4} log-probabilities for {sampled} sampled tokens"
    if sum(count for _, count in versions) != sampled:
        return f"its policy versions {versions} do not add up to {sampled} sampled tokens"
    used = [version for version, count in versions if count]
    if (row["version_min"], row["version_max"]) != (min(used, default=None), max(used, default=None)):
        return f"its policy versions are {versions}, not {row['version_min']} to {row['version_max']}"
    if not 0 <= row["base_messages"] <= base_list:
        return f"it takes {row['base_messages']} messages of its base, which has {base_list}"
    ids = {*unpack_rows(new_messages[: len(new_messages) // 8 * 8]), row["reply_message"]} - {None}
    if len(new_messages) % 8 or not ids <= messages:
        return f"messages are missing: {sorted(ids - messages)}"
    if not named <= calls.keys():
        return f"it names calls that are not earlier ones of its rollout: {sorted(named - calls.keys())}"
    return None


def _sample_problem(row: sqlite3.Row, calls: dict[int, StoredCall], whole: bool) -> str | None:
    path = [(call_id, bool(trained)) for call_id, trained in json.loads(row["calls"])]
    missing = [call_id for call_id, _ in path if call_id not in calls]
    if missing:
        return f"its calls {missing} are {'not there' if whole else 'not whole'}"
    tokens = [calls[call_id].prompt_ids + calls[call_id].response_ids for call_id, _ in path]
    if any(tokens[-1][: len(earlier)] != earlier for earlier in tokens):
        return f"its calls {[call_id for call_id, _ in path]} do not continue one another"
    try:
        sample = join_path([(calls[call_id], trained) for call_id, trained in path])
    except ValueError as error:
        return str(error)
    found = len(sample.input_ids), sum(sample.loss_mask)
    if found != (row["tokens"], row["trained_tokens"]):
        return f"it rebuilds to {found[0]} tokens, {found[1]} trained; {row['tokens']}, {row['trained_tokens']} were"
    return None


def _pruned(db: sqlite3.Connection) -> Iterator[str]:
    for row in db.execute("SELECT id, pruned FROM rollouts WHERE pruned IS NOT NULL").fetchall():
        left = db.execute("SELECT count(*) FROM calls WHERE rollout_id = ?", (row["id"],)).fetchone()[0]
        if left:
            yield f"rollout {row['id']} is marked as pruned and has {left} calls"
        if not _is_object(row["pruned"]) or set(json.loads(row["pruned"])) != set(COUNTED):
            yield f"rollout {row['id']} does not have the numbers of its pruned traffic"


def _is_object(text: str) -> bool:
    try:
        value: Any = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict)
