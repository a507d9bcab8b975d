"""Anything at all sent to the model routes: no 5xx, no hang, no crash; and the published OpenAPI is what is served.

`AGLITE_FUZZ_CASES=20000 python -m pytest tests/gateway/test_gateway_fuzz.py` sends more: so many bodies that were made
from sound ones by mutation, and a twentieth as many made from the schemas.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import schemathesis
from staging import Stage, running

from aglite.config import Limits
from aglite.gateway.renderers import ChatRenderer

ROOT = Path(__file__).parents[2]
DOCUMENT = json.loads((ROOT / "aglite" / "gateway" / "openapi.json").read_text())
CASES = int(os.environ.get("AGLITE_FUZZ_CASES", "2000"))
ROUTES = [(path, method) for path, item in DOCUMENT["paths"].items() for method in item]


class Served:
    """A gateway in a thread of its own, for clients that block."""

    def __init__(self, folder: Path, renderer: ChatRenderer) -> None:
        self._folder, self._renderer = folder, renderer
        self._ready, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with running(self._folder, self._renderer) as stage:
            limits = Limits(calls=10**9, sampled_tokens=10**9, request_bytes=1 << 20)
            session = await stage.session(limits=limits)
            self.stage: Stage = stage
            self.url, self.token = f"{stage.url}{session.path}", session.token
            self._ready.set()
            await self._end.wait()

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._ready.wait(120)
        return self

    def __exit__(self, *_: Any) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(120)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, renderer: ChatRenderer) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("fuzz"), renderer) as made:
        yield made


def test_the_published_openapi_names_the_routes_of_the_gateway() -> None:
    subprocess.run([sys.executable, ROOT / "docs" / "update_openapi.py", "--check"], check=True)


def test_the_openapi_is_served(served: Served) -> None:
    assert httpx.get(f"{served.url}/openapi.json", timeout=60).json() == DOCUMENT


@pytest.mark.parametrize(("path", "method"), ROUTES)
def test_whatever_is_sent_gets_an_answer(served: Served, path: str, method: str) -> None:
    """Bodies after the schema, near it and far from it."""
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method.upper()]
    modes = list(schemathesis.GenerationMode)
    headers = {"authorization": f"Bearer {served.token}", "anthropic-version": "2023-06-01"}
    with httpx.Client(timeout=120) as client:

        @hypothesis.given(
            case=operation.as_strategy(generation_mode=modes[0]) | operation.as_strategy(generation_mode=modes[1])
        )
        @hypothesis.settings(
            max_examples=max(10, CASES // 20 // len(ROUTES)),
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        def send(case: Any) -> None:
            wanted = case.as_transport_kwargs(base_url=served.url)
            response = client.request(
                wanted["method"],
                wanted["url"],
                json=wanted.get("json"),
                content=wanted.get("data") if wanted.get("json") is None else None,
                headers=headers,
            )
            assert response.status_code < 500, (response.text, wanted)
            if response.status_code >= 400:
                assert "error" in response.json()

        send()


TOOL = {
    "name": "shell",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls"}'}}
SOUND: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "List the files.", "name": "ann"},
            {"role": "assistant", "content": None, "reasoning_content": "ls", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        ],
        "tools": [{"type": "function", "function": {**TOOL, "strict": True}}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": ["\n\n"],
        "n": 2,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_completion_tokens": 8,
    },
    "/v1/completions": {
        "model": "m", "prompt": "Once", "max_tokens": 4, "logprobs": 1, "stream": False, "stop": "x", "echo": False,
    },
    "/v1/responses": {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox: off"}]},
            {"role": "user", "content": "List the files."},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "ls"}]},
            {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"command": "ls"}'},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a.txt"}]},
        ],
        "tools": [
            {"type": "function", **TOOL, "strict": False},
            {"type": "custom", "name": "patch", "format": {"type": "text"}},
            {"type": "web_search"},
        ],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "stream": True,
        "max_output_tokens": 8,
        "metadata": {"k": "v"},
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 8,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "List the files."}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "ls", "signature": ""},
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "c1", "name": "shell", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a.txt"}]},
                    {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ],
        "tools": [{"name": "shell", "description": "Run.", "input_schema": TOOL["parameters"]}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "adaptive"},
        "stop_sequences": ["END"],
        "temperature": 1.0,
        "top_k": 5,
        "stream": True,
        "metadata": {"user_id": "u"},
    },
}  # fmt: skip
SOUND["/v1/messages/count_tokens"] = {
    key: SOUND["/v1/messages"][key] for key in ("model", "messages", "system", "tools", "tool_choice", "thinking")
}
ODD: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, 2**63, "", "x", "auto", "\ud7ff\u0000", [], {}, [[]], [None], {"type": "text"},
    {"type": None}, {"": {}}, "a" * 5000, [1, "x", None], {"type": "object", "properties": 3}, {"role": "user"},
]  # fmt: skip


def mutated(value: Any, rng: random.Random) -> Any:
    """A copy with a random place changed: replaced, left out, doubled or swapped with something else of the body."""
    value = json.loads(json.dumps(value))
    places: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        here = waiting.pop()
        for key in here if isinstance(here, dict) else range(len(here)):
            places.append((here, key))
            if isinstance(here[key], dict | list):
                waiting.append(here[key])
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        here, key = rng.choice(places)
        change = rng.randrange(4)
        if change == 0 and isinstance(here, dict):
            here.pop(key, None)
        elif change == 1 and isinstance(here, list):
            here.insert(rng.randrange(len(here) + 1), rng.choice(ODD))
        elif change == 2:
            other, name = rng.choice(places)
            if (isinstance(other, dict) and name in other) or (isinstance(other, list) and name < len(other)):
                here_value = json.loads(json.dumps(other[name]))
                if isinstance(here, dict) or key < len(here):
                    here[key] = here_value
        elif isinstance(here, dict) or key < len(here):
            here[key] = rng.choice(ODD)
    return value


@pytest.mark.parametrize("path", SOUND)
def test_sound_requests_gone_wrong(served: Served, path: str) -> None:
    rng = random.Random(path)
    headers = {"authorization": f"Bearer {served.token}", "anthropic-version": "2023-06-01"}
    seen: Counter[int] = Counter()
    with httpx.Client(timeout=120, headers=headers, base_url=served.url) as client:
        whole = client.post(path, json=SOUND[path])
        assert whole.status_code == 200, whole.text
        for _ in range(CASES // len(SOUND)):
            body = mutated(SOUND[path], rng)
            response = client.post(path, json=body)
            seen[response.status_code] += 1
            assert response.status_code < 500, (response.text, body)
            if response.status_code >= 400:
                assert response.json()["error"]["message"], body
            elif response.headers["content-type"].startswith("text/event-stream"):
                assert response.text.endswith("\n\n")
    assert seen[200] and seen[400], seen
