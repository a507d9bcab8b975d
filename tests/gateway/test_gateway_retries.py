"""Retries and best-of-n on bare sockets: connections reset in the middle, retries that say so, requests that only look
the same. A reply counts as delivered when its end was written while a client was there."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from staging import Stage
from test_gateway_gate import until

from aglite.gateway.exchange import Exchange
from aglite.gateway.sessions import Session

SAY = "say hello"


@dataclass(frozen=True)
class Spoken:
    """How one dialect asks, and how it ends a stream."""

    path: str
    body: dict[str, Any]
    last: bytes
    """In the last event of a stream."""

    def request(self, stream: bool) -> bytes:
        return json.dumps({"model": "m", "stream": stream, **self.body}).encode()


MESSAGES = [{"role": "user", "content": SAY}]
DIALECTS = {
    "chat": Spoken("/v1/chat/completions", {"messages": MESSAGES}, b"[DONE]"),
    "completions": Spoken("/v1/completions", {"prompt": SAY}, b"[DONE]"),
    "responses": Spoken("/v1/responses", {"input": SAY}, b"response.completed"),
    "messages": Spoken("/v1/messages", {"messages": MESSAGES, "max_tokens": 2000}, b"message_stop"),
}

asks = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
speaks = pytest.mark.parametrize("spoken", DIALECTS.values(), ids=DIALECTS)


class Client:
    """One request on a connection of its own, to the byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def ask(cls, stage: Stage, session: Any, spoken: Spoken, stream: bool, **headers: str) -> Client:
        host, port = stage.url.removeprefix("http://").split(":")
        client = cls(*await asyncio.open_connection(host, int(port)))
        body = spoken.request(stream)
        lines = [
            f"POST {session.path}{spoken.path} HTTP/1.1",
            f"Host: {host}",
            f"Authorization: Bearer {session.token}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
        ]
        client.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        return client

    def reset(self) -> None:
        """Close as a crashed client does: the other side gets a RST."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def whole(self) -> bytes:
        """All that comes until the gateway closes the connection."""
        async with asyncio.timeout(60):
            answer = await self.reader.read()
        self.writer.close()
        return answer


def ended(answer: bytes, spoken: Spoken, stream: bool) -> bool:
    return b" 200 " in answer.split(b"\r\n")[0] and (spoken.last in answer if stream else answer.endswith(b"}"))


@pytest.fixture
async def slow_store(stage: Stage) -> AsyncIterator[asyncio.Event]:
    """Replies are recorded only when the event is set: a reply is whole, and its end not yet written."""
    add_call, go = stage.store.add_call, asyncio.Event()

    async def late(record: Any) -> int:
        await go.wait()
        return await add_call(record)

    stage.store.add_call = late  # type: ignore[method-assign]
    yield go
    go.set()


async def sampled(stage: Stage, number: int = 1) -> None:
    await until(lambda: len(stage.engine.sent) == number and stage.engine.running == 0)


async def rows(stage: Stage, session: Any, number: int) -> list[Any]:
    await until(lambda: not session.exchanges and len(stage.calls(session)) == number)
    await stage.gateway.deliveries.flush()
    return stage.calls(session)


@speaks
@asks
async def test_cut_off_while_sampling(stage: Stage, spoken: Spoken, stream: bool) -> None:
    """Nothing whole is there to repeat: what was sampled is recorded without loss, the retry is sampled anew."""
    stage.engine.script = {"latency_s": 0.01, "length": 400}
    session = await stage.session()
    client = await Client.ask(stage, session, spoken, stream)
    await until(lambda: stage.engine.sent and len(stage.engine.sent[0][1]) > 3)
    client.reset()
    await until(lambda: stage.engine.cancelled == 1)
    stage.engine.script = {"replies": [{"text": "hello"}]}
    again = await Client.ask(stage, session, spoken, stream, x_stainless_retry_count="1")
    assert ended(await again.whole(), spoken, stream)
    calls = await rows(stage, session, 2)
    assert [(call.status, call.delivered) for call in calls] == [("cancelled", False), ("ok", True)]


@speaks
@asks
@pytest.mark.parametrize("declared", [False, True], ids=["silent", "declared"])
async def test_cut_off_before_the_end_was_written(
    stage: Stage, slow_store: asyncio.Event, spoken: Spoken, stream: bool, declared: bool
) -> None:
    stage.engine.script = {"replies": [{"text": "the only reply"}]}
    session = await stage.session()
    client = await Client.ask(stage, session, spoken, stream)
    await sampled(stage)
    client.reset()
    await until(lambda: next(iter(session.exchanges)).connection.gone)
    slow_store.set()
    (call,) = await rows(stage, session, 1)
    assert (call.status, call.delivered) == ("ok", False)
    headers = {"x_stainless_retry_count": "1"} if declared else {}
    again = await Client.ask(stage, session, spoken, stream, **headers)
    answer = await again.whole()
    assert ended(answer, spoken, stream)
    (call,) = await rows(stage, session, 1)
    assert call.delivered and len(stage.engine.sent) == 1
    third = await Client.ask(stage, session, spoken, stream)
    await third.whole()
    assert len(await rows(stage, session, 2)) == 2, "once it is delivered, an equal request is another sample"


@speaks
@asks
async def test_a_delivered_reply_is_given_again_only_to_who_says_so(stage: Stage, spoken: Spoken, stream: bool) -> None:
    session = await stage.session()
    for count, number in (("0", 1), ("0", 2), ("1", 2), ("2", 2)):
        client = await Client.ask(stage, session, spoken, stream, x_stainless_retry_count=count)
        assert ended(await client.whole(), spoken, stream)
        assert all(call.delivered for call in await rows(stage, session, number))


@speaks
@asks
async def test_two_retries_join_what_is_in_flight(stage: Stage, spoken: Spoken, stream: bool) -> None:
    stage.engine.script = {"latency_s": 0.01, "length": 40}
    session = await stage.session()
    first = await Client.ask(stage, session, spoken, stream)
    await until(lambda: stage.engine.sent and stage.engine.sent[0][1])
    await stage.engine.preempt()  # it must not end before they have joined
    (exchange,) = session.exchanges
    joiners = [
        await Client.ask(stage, session, spoken, stream, x_stainless_retry_count=str(number)) for number in (1, 2)
    ]
    await until(lambda: exchange.joiners == 2)
    first.reset()
    await stage.engine.resume(0)
    for joiner in joiners:
        assert ended(await joiner.whole(), spoken, stream)
    (call,) = await rows(stage, session, 1)
    assert (call.status, call.delivered, len(call.response_ids)) == ("ok", True, 41)


async def joined(stage: Stage, spoken: Spoken, stream: bool) -> tuple[Session, Client, Exchange, Client]:
    """A long reply that is being sampled for a request, and a retry of it that waits for the same reply."""
    stage.engine.script = {"latency_s": 0.01, "length": 1000}
    session = await stage.session()
    first = await Client.ask(stage, session, spoken, stream)
    await until(lambda: stage.engine.running == 1)
    (exchange,) = session.exchanges
    joiner = await Client.ask(stage, session, spoken, stream, x_stainless_retry_count="1")
    await until(lambda: exchange.joiners == 1)
    return session, first, exchange, joiner


@speaks
@asks
async def test_when_the_last_of_them_leaves_the_sampling_stops(stage: Stage, spoken: Spoken, stream: bool) -> None:
    session, first, exchange, joiner = await joined(stage, spoken, stream)
    first.reset()
    await until(lambda: exchange.connection.gone)
    assert stage.engine.running == 1
    joiner.reset()
    await until(lambda: stage.engine.cancelled == 1)
    (call,) = await rows(stage, session, 1)
    assert (call.status, call.delivered) == ("cancelled", False)


@speaks
@asks
async def test_a_retry_that_has_joined_ends_with_the_rollout(stage: Stage, spoken: Spoken, stream: bool) -> None:
    """What it waits for ends without a reply, and nothing is sampled in its place."""
    session, first, _, joiner = await joined(stage, spoken, stream)
    await stage.gateway.close_session(session.rollout_id)
    assert b" 401 " in (await joiner.whole()).split(b"\r\n")[0]
    await first.whole()
    assert len(stage.engine.sent) == 1 and not session.exchanges
    (call,) = stage.calls(session)
    assert call.status == "cancelled"


@speaks
@asks
async def test_best_of_n_is_sampled_n_times(stage: Stage, spoken: Spoken, stream: bool) -> None:
    """Equal requests side by side, of which one is cut off: its retry repeats that one and takes none of the others."""
    stage.engine.script = {"latency_s": 0.01, "length": 30}
    session = await stage.session()
    await stage.engine.preempt()  # none must end before all have begun
    clients = [await Client.ask(stage, session, spoken, stream) for _ in range(4)]
    await until(lambda: stage.engine.running == 4)
    await stage.engine.resume(0)
    clients[1].reset()
    await until(lambda: stage.engine.cancelled == 1)
    again = await Client.ask(stage, session, spoken, stream, x_stainless_retry_count="1")
    for client in (clients[0], clients[2], clients[3], again):
        assert ended(await client.whole(), spoken, stream)
    calls = await rows(stage, session, 5)
    assert sorted(call.status for call in calls) == ["cancelled", "ok", "ok", "ok", "ok"]
    assert [call.delivered for call in calls] == [call.status == "ok" for call in calls]


@speaks
@asks
async def test_two_that_were_lost_are_both_given_again(
    stage: Stage, slow_store: asyncio.Event, spoken: Spoken, stream: bool
) -> None:
    session = await stage.session(seed=3)
    clients = [await Client.ask(stage, session, spoken, stream) for _ in range(2)]
    await sampled(stage, 2)
    for client in clients:
        client.reset()
    await until(lambda: all(exchange.connection.gone for exchange in session.exchanges))
    slow_store.set()
    await rows(stage, session, 2)
    for _ in range(2):
        again = await Client.ask(stage, session, spoken, stream, x_stainless_retry_count="1")
        await again.whole()
    calls = await rows(stage, session, 2)
    assert [call.delivered for call in calls] == [True, True] and len(stage.engine.sent) == 2


@speaks
@asks
async def test_a_retry_after_an_error_takes_no_other_reply(stage: Stage, spoken: Spoken, stream: bool) -> None:
    """The engine failed one of two equal requests; the client tries that one again while the other still runs."""
    session = await stage.session()
    stage.engine.failure = "out of memory"
    failing = await Client.ask(stage, session, spoken, stream)
    assert b" 503 " in (await failing.whole()).split(b"\r\n")[0]
    stage.engine.failure = None
    await stage.engine.preempt()  # the other must not end before the retry has begun
    other = await Client.ask(stage, session, spoken, stream)
    await until(lambda: stage.engine.running == 1)
    again = await Client.ask(stage, session, spoken, stream, x_stainless_retry_count="1")
    await until(lambda: stage.engine.running == 2)
    await stage.engine.resume(0)
    for client in (other, again):
        assert ended(await client.whole(), spoken, stream)
    assert [call.status for call in await rows(stage, session, 3)] == ["error", "ok", "ok"]
