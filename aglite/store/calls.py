"""Calls, their messages, and the samples made of them."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from aglite.errors import StoreError
from aglite.redact import Redactor
from aglite.store.base import StoreBase, insert
from aglite.store.records import (
    CallRecord,
    SampleRecord,
    StoredCall,
    StoredSample,
    pack_floats,
    pack_ids,
    pack_json,
    pack_rows,
    unpack_floats,
    unpack_ids,
    unpack_rows,
    without_detail,
    without_text,
)
from aglite.training.samples import join_path

CHAIN = """
WITH RECURSIVE chain(id, base_id, base_messages, new_messages, reply_message) AS (
    SELECT id, base_id, base_messages, new_messages, reply_message FROM calls WHERE id = ?
    UNION ALL
    SELECT c.id, c.base_id, c.base_messages, c.new_messages, c.reply_message
    FROM calls c JOIN chain ON c.id = chain.base_id
)
SELECT * FROM chain
"""

ATTEMPT = """WHERE rollout_id = :id
AND attempt = coalesce(:attempt, (SELECT max(attempt, 1) FROM rollouts WHERE id = :id))"""

REQUEST_KEYS = frozenset({"model", "tools", "type"})
"""Keys of a call's request that are never masked."""


class CallStore(StoreBase):
    # writes

    async def add_call(self, call: CallRecord) -> int:
        """Record a call; returns its id once it is committed.

        Raises StoreError, with nothing recorded, when lengths do not add up or the rollout or base is not there.
        """
        row = _call_row(call)
        keep, redactor = self.keep_messages, self.redactor
        replied = keep and call.reply_message is not None
        said = [*call.new_messages, *([call.reply_message] if replied else [])] if keep else []
        packed = [pack_json(message) for message in said] if not redactor else []
        if not keep:
            row.update(base_messages=0, request=pack_json(without_text(call.request)), error=without_detail(call.error))

        def write(db: sqlite3.Connection) -> int:
            if call.base_id is not None:
                _check_base(db, call)
            elif not db.execute("SELECT 1 FROM rollouts WHERE id = ?", (call.rollout_id,)).fetchone():
                raise StoreError(f"there is no rollout {call.rollout_id} to record a call of")
            bodies = packed
            if redactor:  # here, because it may take long and this is not the gateway's thread
                bodies = [pack_json(redactor.message(message)) for message in said]
                row.update(request=mask_json(row["request"], redactor), error=redactor.text(row["error"]))
            ids = [message_id(db, body) for body in bodies]
            reply = ids.pop() if replied else None
            return insert(db, "calls", {**row, "new_messages": pack_rows(ids), "reply_message": reply})

        return await self._write(write)

    async def mark_delivered(self, call_ids: Iterable[int]) -> None:
        """The replies of these calls did reach the agent."""
        ids = [(call_id,) for call_id in call_ids]

        def write(db: sqlite3.Connection) -> None:
            db.executemany("UPDATE calls SET delivered = 1 WHERE id = ?", ids)

        await self._write(write)

    async def add_samples(self, step: int, samples: Iterable[SampleRecord]) -> None:
        """Record what a step trained."""
        rows = [sample_row(step, sample) for sample in samples]

        def write(db: sqlite3.Connection) -> None:
            for row in rows:
                insert(db, "samples", row)

        await self._write(write)

    # reads

    def calls(self, rollout_id: str, attempt: int | None = None) -> list[StoredCall]:
        """The calls of an attempt (default: the current or last one) in the order they were started."""
        rows = self._rows(f"SELECT * FROM calls {ATTEMPT} ORDER BY id", {"id": rollout_id, "attempt": attempt})
        return sorted(_rebuild(rows), key=lambda call: (call.started_at, call.id))

    def call(self, call_id: int) -> StoredCall:
        """One call. Raises StoreError when there is none."""
        row = self._row("SELECT rollout_id, attempt FROM calls WHERE id = ?", (call_id,))
        if row is None:
            raise StoreError(f"there is no call {call_id} in {self.path}")
        return next(call for call in self.calls(row["rollout_id"], row["attempt"]) if call.id == call_id)

    def conversations(
        self, rollout_id: str, attempt: int | None = None
    ) -> dict[int, tuple[list[dict[str, Any]], dict[str, Any] | None]]:
        """For each call of an attempt, by id: the messages of its prompt, and its reply if it has one.

        Much quicker than call by call; equal messages are one object in all the lists, so do not change them.
        """
        sql = f"""SELECT id, base_id, base_messages, new_messages, reply_message FROM calls {ATTEMPT} ORDER BY id"""
        rows = self._rows(sql, {"id": rollout_id, "attempt": attempt})
        added = {row["id"]: unpack_rows(row["new_messages"]) for row in rows}
        wanted = {message_id for ids in added.values() for message_id in ids}
        wanted.update(row["reply_message"] for row in rows if row["reply_message"] is not None)
        bodies = {message_id: json.loads(body) for message_id, body in self._bodies(wanted).items()}
        found: dict[int, tuple[list[dict[str, Any]], dict[str, Any] | None]] = {}
        for row in rows:
            messages: list[dict[str, Any]] = []
            if row["base_id"] is not None:
                before, reply = found[row["base_id"]]
                messages = before[: row["base_messages"]]
                if reply is not None and row["base_messages"] > len(before):
                    messages.append(reply)
            messages.extend(bodies[message_id] for message_id in added[row["id"]])
            found[row["id"]] = (messages, bodies.get(row["reply_message"]))
        return found

    def messages(self, call: StoredCall | int) -> list[dict[str, Any]]:
        """The messages of a call's prompt. Empty when the run keeps tokens only."""
        chain = self._rows(CHAIN, (call if isinstance(call, int) else call.id,))
        ids: list[int] = []
        base = None
        for row in reversed(chain):
            if base is not None and base["reply_message"] is not None:
                ids.append(base["reply_message"])
            ids = ids[: row["base_messages"]] + unpack_rows(row["new_messages"]).tolist()
            base = row
        bodies = self._bodies(set(ids))
        return [json.loads(bodies[message_id]) for message_id in ids]

    def reply(self, call: StoredCall | int) -> dict[str, Any] | None:
        """The message that a call answered with, if it has one."""
        sql = "SELECT body FROM messages JOIN calls ON reply_message = messages.id WHERE calls.id = ?"
        row = self._row(sql, (call if isinstance(call, int) else call.id,))
        return None if row is None else json.loads(row["body"])

    def facts(self, call_id: int) -> dict[str, Any]:
        """prompt_len, response_len, finish_reason, started_at, finished_at and request of one call, quickly: nothing of
        it is rebuilt."""
        sql = "SELECT prompt_len, response_len, finish_reason, started_at, finished_at, request FROM calls WHERE id = ?"
        row = dict(self._rows(sql, (call_id,))[0])
        return {**row, "request": json.loads(row["request"])}

    def replied(self, reply_id: str, rollout_id: str, token_hash: bytes) -> int | None:
        """The call whose reply has this id, of the rollout or of an earlier one with the same token; None if there is
        none."""
        sql = """SELECT calls.id FROM calls JOIN rollouts ON rollouts.id = calls.rollout_id
                 WHERE reply_id = ? AND (rollout_id = ? OR token_hash = ?) ORDER BY calls.id DESC LIMIT 1"""
        row = self._row(sql, (reply_id, rollout_id, token_hash))
        return None if row is None else row["id"]

    def samples(
        self, step: int | None = None, rollout_id: str | None = None, rolled_back: bool = False
    ) -> list[StoredSample]:
        """Samples of a step, of a rollout or all, rebuilt as the trainer saw them, in the order they were recorded.

        Those of steps that were rolled back only with `rolled_back`.
        """
        wanted = {"step": step, "rollout_id": rollout_id, "rolled_back": None if rolled_back else 0}
        values = {name: value for name, value in wanted.items() if value is not None}
        where = " AND ".join(f"{name} = :{name}" for name in values) or "true"
        rows = self._rows(f"SELECT * FROM samples WHERE {where} ORDER BY id", values)
        last = {row["rollout_id"]: position for position, row in enumerate(rows)}
        loaded: dict[str, dict[int, StoredCall]] = {}
        found = []
        for position, row in enumerate(rows):
            owner = row["rollout_id"]
            path = [(call_id, bool(trained)) for call_id, trained in json.loads(row["calls"])]
            if owner not in loaded:
                attempt = self._row("SELECT attempt FROM calls WHERE id = ?", (path[0][0],))["attempt"]
                loaded[owner] = {call.id: call for call in self.calls(owner, attempt)}
            sample = join_path([(loaded[owner][call_id], trained) for call_id, trained in path])
            if last[owner] == position:  # a whole run's tokens need not fit into memory twice
                del loaded[owner]
            found.append(
                StoredSample(
                    id=row["id"],
                    step=row["step"],
                    rollout_id=owner,
                    input_ids=sample.input_ids,
                    loss_mask=sample.loss_mask,
                    logprobs=sample.logprobs,
                    versions=sample.versions,
                    constrained=sample.constrained,
                    calls=path,
                    advantage=row["advantage"],
                    weight=row["weight"],
                )
            )
        return found

    def _bodies(self, ids: set[int]) -> dict[int, str]:
        wanted = sorted(ids)
        bodies: dict[int, str] = {}
        for start, stop in pairwise([*range(0, len(wanted), 500), len(wanted)]):
            part = wanted[start:stop]
            sql = f"SELECT id, body FROM messages WHERE id IN ({', '.join('?' * len(part))})"
            bodies |= {row["id"]: row["body"] for row in self._rows(sql, part)}
        return bodies


def sample_row(step: int, sample: SampleRecord) -> dict[str, Any]:
    return {
        "step": step,
        "rollout_id": sample.rollout_id,
        "calls": pack_json([[call_id, int(trained)] for call_id, trained in sample.calls]),
        "tokens": sample.tokens,
        "trained_tokens": sample.trained_tokens,
        "advantage": sample.advantage,
        "weight": sample.weight,
    }


def mask_json(text: str, redactor: Redactor) -> str:
    """What an agent asked for, as it is stored, with the texts in it masked."""
    return pack_json(redactor.value(json.loads(text), REQUEST_KEYS))


def _call_row(call: CallRecord) -> dict[str, Any]:
    sampled = len(call.response_ids)
    problem = ""
    if call.prompt_len != call.base_len + len(call.new_prompt_ids):
        problem = f"prompt_len {call.prompt_len} is not base_len {call.base_len} + {len(call.new_prompt_ids)} new ids"
    elif call.base_id is None and (call.base_len or call.base_messages):
        problem = "base_len or base_messages without a base_id"
    elif len(call.logprobs) not in (0, sampled):
        problem = f"{len(call.logprobs)} log-probabilities for {sampled} sampled tokens"
    elif sum(count for _, count in call.versions) != sampled:
        problem = f"versions {list(call.versions)} do not add up to {sampled} sampled tokens"
    if problem:
        raise StoreError(f"a call of rollout {call.rollout_id} does not add up: {problem}")
    versions = [version for version, count in call.versions if count]
    return {
        "rollout_id": call.rollout_id,
        "attempt": call.attempt,
        "parent_id": call.parent_id,
        "matched_id": call.matched_id,
        "fork_cause": call.fork_cause,
        "base_id": call.base_id,
        "base_len": call.base_len,
        "prompt_len": call.prompt_len,
        "new_prompt_ids": pack_ids(call.new_prompt_ids),
        "response_ids": pack_ids(call.response_ids),
        "response_len": sampled,
        "logprobs": pack_floats(call.logprobs),
        "versions": pack_json([list(span) for span in call.versions]),
        "version_min": min(versions, default=None),
        "version_max": max(versions, default=None),
        "dialect": call.dialect,
        "base_messages": call.base_messages,
        "request": pack_json(call.request),
        "finish_reason": call.finish_reason,
        "status": call.status,
        "error": call.error,
        "delivered": int(call.delivered),
        "retry_of": call.retry_of,
        "constrained": int(call.constrained),
        "held_s": call.held_s,
        "reply_id": call.reply_id,
        "started_at": call.started_at,
        "first_token_at": call.first_token_at,
        "finished_at": call.finished_at,
    }


def _check_base(db: sqlite3.Connection, call: CallRecord) -> None:
    sql = "SELECT rollout_id, attempt, prompt_len + response_len AS tokens FROM calls WHERE id = ?"
    base = db.execute(sql, (call.base_id,)).fetchone()
    if base is None or (base["rollout_id"], base["attempt"]) != (call.rollout_id, call.attempt):
        raise StoreError(
            f"call {call.base_id} is no call of attempt {call.attempt} of rollout {call.rollout_id}: "
            "it cannot be the base of one"
        )
    if not 0 <= call.base_len <= base["tokens"]:
        raise StoreError(f"call {call.base_id} has {base['tokens']} tokens: base_len cannot be {call.base_len}")


def digest_of(body: str) -> bytes:
    """The hash that a message is found by."""
    return hashlib.sha256(body.encode()).digest()[:16]


def message_id(db: sqlite3.Connection, body: str) -> int:
    """The row of a message; made when it is not there yet."""
    digest = digest_of(body)
    row = db.execute("SELECT id FROM messages WHERE hash = ?", (digest,)).fetchone()
    return row["id"] if row else insert(db, "messages", {"hash": digest, "body": body})


def _rebuild(rows: Sequence[sqlite3.Row]) -> list[StoredCall]:
    """Rows in order of id, so that a base comes before what continues it."""
    built: dict[int, StoredCall] = {}
    for row in rows:
        built[row["id"]] = rebuild(row, None if row["base_id"] is None else built[row["base_id"]])
    return list(built.values())


def rebuild(row: sqlite3.Row, base: StoredCall | None) -> StoredCall:
    """A call with the whole of its prompt, from its row and the call that it is based on."""
    prompt = array("i")
    if base is not None:
        prompt = base.prompt_ids[: row["base_len"]]
        prompt += base.response_ids[: row["base_len"] - len(prompt)]
    prompt += unpack_ids(row["new_prompt_ids"])
    return StoredCall(
        id=row["id"],
        rollout_id=row["rollout_id"],
        attempt=row["attempt"],
        parent_id=row["parent_id"],
        matched_id=row["matched_id"],
        fork_cause=row["fork_cause"],
        base_id=row["base_id"],
        base_len=row["base_len"],
        prompt_ids=prompt,
        response_ids=unpack_ids(row["response_ids"]),
        logprobs=unpack_floats(row["logprobs"]),
        versions=json.loads(row["versions"]),
        dialect=row["dialect"],
        request=json.loads(row["request"]),
        finish_reason=row["finish_reason"],
        status=row["status"],
        error=row["error"],
        delivered=bool(row["delivered"]),
        retry_of=row["retry_of"],
        constrained=bool(row["constrained"]),
        held_s=row["held_s"],
        started_at=row["started_at"],
        first_token_at=row["first_token_at"],
        finished_at=row["finished_at"],
    )
