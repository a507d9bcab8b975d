"""Listening sockets."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys

import pytest

from aglite import net

RAISE = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
from aglite.net import allow_many_files
allow_many_files()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""


def test_the_limit_of_open_files_is_raised_as_far_as_it_may() -> None:
    subprocess.run([sys.executable, "-c", RAISE], check=True)


async def test_one_agents_socket_takes_so_many_connections_and_no_more(monkeypatch):
    monkeypatch.setattr(net, "MOST_CONNECTIONS", 3)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def asks(reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        return await reader.readline()

    listener = net.Listener(app, net.bind("127.0.0.1", 0, "the test", "x"))
    await listener.start()
    sockets = [net.bind("127.0.0.1", 0, "the test", "x") for _ in range(2)]
    servers = [await listener.also(sock) for sock in sockets]
    try:
        held = [await asyncio.open_connection(*sockets[0].getsockname()) for _ in range(5)]
        answers = await asyncio.gather(*(asks(*one) for one in held), return_exceptions=True)
        assert [isinstance(one, bytes) and b"204" in one for one in answers] == [True] * 3 + [False] * 2
        other = await asyncio.open_connection(*sockets[1].getsockname())
        assert b"204" in await asks(*other), "each socket for itself"
        for _, writer in held[:1]:
            writer.close()
        async with asyncio.timeout(60):  # a place is free again, once the server has seen it
            while True:
                again = await asyncio.open_connection(*sockets[0].getsockname())
                with contextlib.suppress(ConnectionError):
                    if b"204" in await asks(*again):
                        break
                again[1].close()
        for _, writer in [*held, other, again]:
            writer.close()
    finally:
        for server in servers:
            server.close()
        await listener.stop()


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (HEAD, b"x: " + bytes(97 * [121]) + b"\r\n"),
        (HEAD + b"x: ", bytes(100 * [121])),
        (b"GET /", bytes(100 * [121])),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x: " + bytes(95 * [121]) + b"\r\n"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;", bytes(100 * [121])),
    ],
    ids=["headers", "a header", "a path", "trailers", "the size of a chunk"],
)
async def test_a_request_whose_head_does_not_end_is_cut(monkeypatch, head, part):
    monkeypatch.setattr(net, "HEAD_BYTES", 100_000)

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    sock = net.bind("127.0.0.1", 0, "the test", "x")
    address = sock.getsockname()
    listener = net.Listener(app, sock)
    await listener.start()
    try:
        _, writer = await asyncio.open_connection(*address)
        writer.write(head)
        with pytest.raises(ConnectionError):
            for _ in range(100_000):
                writer.write(part)
                await writer.drain()
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(3):  # no more than one at a time counts
            writer.write(HEAD + b"x: " + bytes(60_000 * [121]) + b"\r\ncontent-length: 400000\r\n\r\n" + bytes(400_000))
            assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()
    finally:
        await listener.stop()
