"""Engines that are not ours, on real sockets: a small vLLM and a small Chat Completions endpoint."""

from __future__ import annotations

import asyncio
import json
import math
import random
import socket
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from aglite.gateway.tokenizer import TextTokenizer


class StandIn:
    """A server that can be stopped and started again at its address. Keeps the bodies of its requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._kept: socket.socket | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_port=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._let_go()

    async def stop(self, *, comes_back: bool = False) -> None:
        """With `comes_back`, nobody else gets its port meanwhile; who connects to it is refused all the same."""
        self._let_go()
        if comes_back:
            self._kept = socket.socket()
            self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._kept.bind(("127.0.0.1", self.port))
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _let_go(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            self.requests.append(await request.json())
            self.headers.append(dict(request.headers))
        return await self.answer(request)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        raise NotImplementedError

    @staticmethod
    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        return response


async def send(response: web.StreamResponse, *events: Any) -> None:
    data = [event if isinstance(event, str) else json.dumps(event) for event in events]
    await response.write("".join(f"data: {one}\n\n" for one in data).encode())


class VllmServer(StandIn):
    """Samples from a few tokens whose logits depend on the position. `fault` makes it what a probe must refuse:
    raw (log-probabilities before temperature), no_ids, no_logprobs, other_prompt, other_text, mixed_up.

    `refuse` (status, body, headers) answers every generation; `pause` holds each token after the first until it is set;
    `drop_after` breaks the connection off after so many tokens.
    """

    def __init__(self, tokenizer: TextTokenizer, *, model: str = "tiny", fault: str = "") -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.model = model
        self.fault = fault
        self.context_length = 2048
        self.refuse: tuple[int, dict[str, Any], dict[str, str]] | None = None
        self.drop_after: int | None = None
        self.pause: asyncio.Event | None = None
        self.running = 0
        self.most_running = 0
        self.aborted = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/models":
            card = {"id": self.model, "object": "model", "owned_by": "vllm", "max_model_len": self.context_length}
            return web.json_response({"object": "list", "data": [card]})
        if request.path != "/v1/completions":
            return web.json_response({"detail": "Not Found"}, status=404)
        if self.refuse is not None:
            status, body, headers = self.refuse
            return web.json_response(body, status=status, headers=headers)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._generate(request, self.requests[-1])
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await self.stream(request) if body["stream"] else None
        choices = []
        rng = random.Random(body.get("seed"))
        count = body["max_tokens"]
        for at in range(count):
            if at:
                await self.next_token()
            if at == self.drop_after:
                assert request.transport is not None
                request.transport.abort()
                return response or web.Response()
            logprobs = self.distribution(at, body["temperature"])
            token = rng.choices(list(logprobs), [math.exp(value) for value in logprobs.values()])[0]
            if self.fault == "raw":
                logprobs = self.distribution(at, 1.0)
            finish = "length" if at == count - 1 else "stop" if token in body["stop_token_ids"] else None
            choice = self._choice(body, at, token, logprobs, finish)
            choices.append(choice)
            if response is not None:
                await send(response, {"id": "cmpl-1", "object": "text_completion", "choices": [choice]})
            if finish:
                break
        if response is None:
            return web.json_response({"id": "cmpl-1", "object": "text_completion", "choices": [_joined(choices)]})
        await send(response, "[DONE]")
        await response.write_eof()
        return response

    async def next_token(self) -> None:
        """Called before every token but the first."""
        if self.pause is not None:
            await self.pause.wait()

    def distribution(self, at: int, temperature: float) -> dict[int, float]:
        """Log-probabilities of the eight tokens that can come at a position."""
        logits = {300 + 8 * (at % 8) + n: (0.9 * n * n + at) % 4.0 for n in range(8)}
        scaled = {token: logit / (temperature or 1.0) for token, logit in logits.items()}
        norm = math.log(sum(map(math.exp, scaled.values())))
        return {token: value - norm for token, value in scaled.items()}

    def _choice(
        self, body: dict[str, Any], at: int, token: int, logprobs: dict[int, float], finish: str | None
    ) -> dict[str, Any]:
        def name(one: int) -> str:
            return f"token_id:{one}" if body.get("return_tokens_as_token_ids") else self.tokenizer.decode([one])

        ranked = sorted(logprobs, key=lambda one: -logprobs[one])[: body["logprobs"]]
        named = {name(one): logprobs[one] for one in dict.fromkeys([token, *ranked])}
        choice: dict[str, Any] = {"index": 0, "text": self.tokenizer.decode([token]), "finish_reason": finish}
        choice["logprobs"] = {"tokens": [name(token)], "token_logprobs": [logprobs[token]], "top_logprobs": [named]}
        choice["token_ids"] = [token]
        if at == 0:
            choice["prompt_token_ids"] = body["prompt"]
        if self.fault == "no_ids":
            choice["token_ids"] = choice["prompt_token_ids"] = None
        elif self.fault == "no_logprobs":
            choice["logprobs"] = None
        elif self.fault == "other_prompt" and at == 0:
            choice["prompt_token_ids"] = [1, *body["prompt"]]
        elif self.fault == "other_text":
            choice["text"] = "other words"
        elif self.fault == "mixed_up":
            choice["logprobs"]["token_logprobs"] = [0.5]
        return choice


def _joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The choice of a response that is no stream."""
    lists = [choice["logprobs"] for choice in choices]
    return {
        **choices[-1],
        "text": "".join(choice["text"] for choice in choices),
        "token_ids": [token for choice in choices for token in choice["token_ids"]],
        "prompt_token_ids": choices[0]["prompt_token_ids"],
        "logprobs": {key: [value for one in lists for value in one[key]] for key in lists[0]},
    }


class ApiServer(StandIn):
    """Answers each chat request with the next of `replies`: a list of events (a stream; a number is a pause in
    seconds), or (status, body, headers)."""

    def __init__(self, *replies: Any) -> None:
        super().__init__()
        self.replies = list(replies)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/v1/chat/completions":
            return web.json_response({"error": {"message": f"no route {request.path}"}}, status=404)
        reply = self.replies.pop(0)
        if isinstance(reply, tuple):
            status, body, headers = reply
            return web.json_response(body, status=status, headers=headers)
        response = await self.stream(request)
        for event in reply:
            await (asyncio.sleep(event) if isinstance(event, float) else send(response, event))
        await send(response, "[DONE]")
        await response.write_eof()
        return response


def said(*deltas: dict[str, Any], finish: str = "stop", usage: Sequence[int] | None = (7, 3)) -> list[dict[str, Any]]:
    """The events of a reply."""
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    if usage:
        events.append({"choices": [], "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]}})
    return events
