"""Clients that are slow, silent, huge or gone: the others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket

import psutil
import pytest
from staging import Stage
from test_gateway_gate import until

from aglite.gateway import gateway

MESSAGES = [{"role": "user", "content": "hi"}]


async def _answered(stage: Stage, session, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        reply = await stage.client(session).chat.completions.create(model="m", messages=MESSAGES)
    assert reply.usage.completion_tokens > 0


def _head(session, length: int | None, *more: str) -> bytes:
    lines = [
        f"POST {session.path}/v1/chat/completions HTTP/1.1",
        "host: x",
        f"authorization: Bearer {session.token}",
        "content-type: application/json",
        "transfer-encoding: chunked" if length is None else f"content-length: {length}",
        *more,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _connect(stage: Stage) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = stage.url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_thousand_idle_connections(stage: Stage) -> None:
    """Half of them silent from the start, half in the middle of a request's head."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4000:
        pytest.skip(f"this machine allows {hard} open files a process, both ends of 1,000 connections need more")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4000), hard))
    session = await stage.session()
    idle = [await _connect(stage) for _ in range(1000)]
    try:
        for _, writer in idle[::2]:
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        await _answered(stage, session)
    finally:
        for _, writer in idle:
            writer.close()
    await _answered(stage, session)


@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
async def test_a_body_of_100_mb_is_refused_and_takes_no_memory(stage: Stage, chunked: bool) -> None:
    session = await stage.session()
    reader, writer = await _connect(stage)
    size, piece = 100 * 2**20, b"x" * 2**20
    before = psutil.Process().memory_info().rss
    writer.write(_head(session, None if chunked else size))
    most = 0

    async def send() -> None:
        for _ in range(size // len(piece)):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()

    sending = asyncio.create_task(send())
    async with asyncio.timeout(60):
        answer = await reader.readuntil(b"\r\n\r\n")
        most = max(most, psutil.Process().memory_info().rss - before)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert most < 40 * 2**20
    await _answered(stage, session)


async def test_clients_that_read_nothing_hold_up_nobody(stage: Stage) -> None:
    """Streams far longer than what the sockets buffer; the engine's work for them ends with the rollout."""
    stage.engine.script = {"length": 3000, "tokens_per_chunk": 50}
    session = await stage.session("r-slow")
    body = json.dumps({"messages": MESSAGES, "stream": True, "max_tokens": 3000, "logprobs": True}).encode()
    deaf = []
    for _ in range(8):
        reader, writer = await _connect(stage)
        reader._limit = 1  # type: ignore[attr-defined]  # the transport is paused at once
        writer.write(_head(session, len(body)) + body)
        deaf.append(writer)
    await until(lambda: len(stage.engine.sent) == len(deaf))
    stage.engine.script = {}
    other = await stage.session("r-other")
    await _answered(stage, other)
    async with asyncio.timeout(60):
        await stage.gateway.close_session("r-slow")
    assert stage.engine.running == 0
    for writer in deaf:
        writer.transport.abort()


async def test_clients_that_vanish_in_the_middle_of_a_body(stage: Stage) -> None:
    session = await stage.session()
    for cut in (0, 10):
        _, writer = await _connect(stage)
        writer.write(_head(session, 1000) + b"x" * cut)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
    await _answered(stage, session)
    await until(lambda: not session.exchanges)


async def test_a_request_that_is_whole_only_after_its_rollout_has_ended_is_turned_away(stage: Stage) -> None:
    session = await stage.session()
    reader, writer = await _connect(stage)
    body = json.dumps({"messages": MESSAGES}).encode()
    writer.write(_head(session, len(body)) + body[:10])
    await writer.drain()
    await asyncio.sleep(0.1)  # it is let in, and its body waited for
    await stage.gateway.close_session(session.rollout_id)
    writer.write(body[10:])
    async with asyncio.timeout(60):
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401 ")
    assert stage.engine.sent == [] and stage.calls(session) == []
    writer.close()


async def test_a_client_that_closes_its_sending_half_still_gets_its_answer_or_is_counted_gone(stage: Stage) -> None:
    stage.engine.script = {"length": 4, "latency_s": 0.02}
    session = await stage.session()
    reader, writer = await _connect(stage)
    body = json.dumps({"messages": MESSAGES}).encode()
    writer.write(_head(session, len(body)) + body)
    writer.write_eof()
    async with asyncio.timeout(60):
        answer = await reader.read()
    await asyncio.gather(*(exchange.done for exchange in session.exchanges))
    (call,) = stage.calls(session)
    assert call.delivered == (b"200 OK" in answer)


async def test_nonsense_instead_of_http(stage: Stage) -> None:
    session = await stage.session()
    for data in (b"\x16\x03\x01\x02\x00\x01" * 50, b"GET\r\n\r\n", os.urandom(4096), b"A" * 200_000):
        reader, writer = await _connect(stage)
        writer.write(data)
        writer.write_eof()
        answer = b""
        with contextlib.suppress(ConnectionError):  # hung up on before all of it was read
            async with asyncio.timeout(60):
                answer = await reader.read()
        assert not answer or answer.startswith(b"HTTP/1.1 4")
        writer.close()
    await _answered(stage, session)


async def test_many_requests_on_one_connection_at_once(stage: Stage) -> None:
    """Pipelining: each is answered, in order."""
    session = await stage.session()
    reader, writer = await _connect(stage)
    body = json.dumps({"messages": MESSAGES, "max_tokens": 2}).encode()
    writer.write((_head(session, len(body)) + body) * 5)
    for _ in range(5):
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")
            )
            await reader.readexactly(length)
        assert head.startswith(b"HTTP/1.1 200 ")
    writer.close()


async def _deaf(stage: Stage, session, body: bytes) -> asyncio.StreamWriter:
    """A client that asks and then reads nothing, with little room between it and the server."""
    loop = asyncio.get_running_loop()
    host, _, port = stage.url.removeprefix("http://").rpartition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await loop.sock_connect(sock, (host, int(port)))
    _, writer = await asyncio.open_connection(sock=sock)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(_head(session, len(body)) + body)
    return writer


async def test_a_rollout_ends_though_a_client_never_reads_the_end_of_its_reply(stage: Stage) -> None:
    """The last event waits for room on the way to it; the reply is recorded, and not delivered."""
    stage.engine.script = {"length": 3000, "tokens_per_chunk": 3001}
    session = await stage.session("r-deaf")
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 3000, "logprobs": True, "top_logprobs": 20}
    writer = await _deaf(stage, session, json.dumps(body).encode())
    await until(lambda: stage.calls(session))
    assert session.exchanges, "the whole reply found room: the test tests nothing"
    async with asyncio.timeout(60):
        await stage.gateway.close_session("r-deaf")
    assert not session.exchanges
    (call,) = stage.calls(session)
    assert (call.status, call.delivered, len(call.response_ids)) == ("ok", False, 3000)
    writer.transport.abort()


async def test_a_client_that_reads_nothing_does_not_stop_the_keep_alives_of_the_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream is full up to the brim and silent, so the next keep-alive for it waits for ever."""
    monkeypatch.setattr(gateway, "KEEPALIVE_S", 0.2)
    stage.gateway.gate.max_hold_s = 0.4  # how often the gateway looks: a quarter of it
    stage.engine.script = {
        "replies": [
            {"match": "deaf", "text": "word " * 3000, "finish": "length"},
            {"text": "slow words for somebody who listens"},
        ],
        "tokens_per_chunk": 2900,
        "latency_s": 0.0003,
    }
    session = await stage.session("r-deaf")
    asked = {"stream": True, "max_tokens": 3500, "logprobs": True, "top_logprobs": 20}
    body = {"messages": [{"role": "user", "content": "deaf"}], **asked}
    writer = await _deaf(stage, session, json.dumps(body).encode())
    await until(lambda: stage.engine.sent and len(stage.engine.sent[0][1]) >= 2900)
    await stage.engine.preempt()  # an update begins: nothing more comes
    await asyncio.sleep(1)
    assert stage.engine.running == 1, "the deaf client's reply has ended: the test tests nothing"
    other = await stage.session("r-other")
    reader, listening = await _connect(stage)
    body = json.dumps({"messages": MESSAGES, "stream": True}).encode()
    listening.write(_head(other, len(body)) + body)
    async with asyncio.timeout(60):
        for _ in range(3):
            await reader.readuntil(b": keep-alive")
    await stage.engine.resume(1)
    async with asyncio.timeout(60):
        await reader.readuntil(b"[DONE]")
    writer.transport.abort()
    listening.close()
