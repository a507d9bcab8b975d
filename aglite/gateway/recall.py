"""Conversations that a request names instead of sending them: taken from the store."""

from __future__ import annotations

from typing import Any

import orjson

from aglite.gateway.dialects.base import INSTRUCTIONS, QUOTED, Request, RequestError
from aglite.gateway.sessions import Session
from aglite.store import Store


def recall(store: Store, session: Session, request: Request) -> None:
    """Put the named conversation, and whole replies that are referred to, into the request's messages.

    Only replies of the rollout itself, or of earlier ones with the same token, can be named. Raises RequestError.
    """
    if store.redactor and (request.previous is not None or any(QUOTED in message for message in request.messages)):
        raise RequestError(
            "previous_response_id",
            "this run masks what it stores (redact.stored), so an earlier response cannot be continued by its id. Send "
            "the whole conversation as input instead.",
            "previous_response_not_found",
        )
    quoted: dict[str, dict[str, Any]] = {}
    size, most = 0, session.limits.request_bytes
    for at, message in enumerate(request.messages):
        if QUOTED in message:
            reply_id = message[QUOTED]
            if reply_id not in quoted:
                quoted[reply_id] = _reply(store, _find(store, session, reply_id, "input"))
            reply = request.messages[at] = quoted[reply_id]
            size += len(orjson.dumps(reply))
            if size > most:  # a short reference can stand for a long reply, and a request can have very many
                raise RequestError("input", f"the replies that input refers to are longer than {most} bytes together")
    if request.previous is None:
        return
    call_id = _find(store, session, request.previous, "previous_response_id")
    before = store.messages(call_id)
    if before and store.facts(call_id)["request"]["asked"].get(INSTRUCTIONS):
        del before[0]
    own = 1 if request.asked.get(INSTRUCTIONS) else 0
    request.messages[own:own] = [*before, _reply(store, call_id)]


def recorded(store: Store, session: Session, reply_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A recorded reply: the facts of its call (see `CallStore.facts`) and its message. Raises RequestError."""
    call_id = _find(store, session, reply_id, "response_id")
    return store.facts(call_id), _reply(store, call_id)


def _find(store: Store, session: Session, reply_id: str, param: str) -> int:
    call_id = store.replied(reply_id, session.rollout_id, session.token_hash)
    if call_id is None:
        raise RequestError(
            param,
            f"Response with id {reply_id!r} not found: it is of another rollout, was asked for with store: false, or "
            "failed. Send the whole conversation as input instead.",
            "previous_response_not_found",
        )
    return call_id


def _reply(store: Store, call_id: int) -> dict[str, Any]:
    reply = store.reply(call_id)
    if reply is None:
        raise RequestError(
            "previous_response_id",
            "this run keeps no messages (retention.traffic: tokens), so an earlier response cannot be continued by its "
            "id. Send the whole conversation as input instead.",
            "previous_response_not_found",
        )
    return reply
