"""A killed server has every reply that a client saw whole: committed before its last byte was sent."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
from mini_run import MiniRun

from aglite.gateway.tokenizer import TextTokenizer
from aglite.store import Store


def _start(run: MiniRun, where: Path) -> tuple[subprocess.Popen[str], str]:
    command = run.command("serve", str(run.folder / "model"), "--dir", str(where))
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=run.environment, cwd=run.folder, start_new_session=True
    )
    assert server.stdout is not None
    line = next(line for line in server.stdout if line.startswith("serving"))
    found = re.search(r"(http://\S+)/v1", line)
    assert found is not None
    return server, found[1]


async def _agent(http: httpx.AsyncClient, number: int, seen: list[tuple[str, str, int]]) -> None:
    """Ask until the server is gone; note (prompt, text, sampled tokens) of every reply that arrived whole."""
    for turn in range(10_000):
        asked = f"agent {number} turn {turn}"
        body = {"messages": [{"role": "user", "content": asked}], "max_tokens": 40, "stream": bool((number + turn) % 2)}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        try:
            reply = await http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer a{number}"})
        except httpx.TransportError:
            return
        assert reply.status_code == 200, reply.text
        if not body["stream"]:
            whole = reply.json()
            text, usage = whole["choices"][0]["message"]["content"], whole["usage"]
        else:
            if not reply.text.endswith("data: [DONE]\n\n"):
                return
            events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
            text = "".join(one["delta"].get("content") or "" for event in events for one in event["choices"])
            usage = events[-1]["usage"]
        seen.append((asked, text, usage["completion_tokens"]))


@pytest.mark.parametrize("after", [25, 90])
def test_every_whole_reply_survives_a_kill(tmp_path: Path, after: int) -> None:
    """`after`: replies that clients have when the server is killed, with 16 calls in flight, half of them streams."""
    run = MiniRun(tmp_path, script={"length": 10, "latency_s": 0.004, "tokens_per_chunk": 3})
    where = tmp_path / "served"
    server, url = _start(run, where)
    seen: list[tuple[str, str, int]] = []

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            agents = [asyncio.create_task(_agent(http, number, seen)) for number in range(16)]
            async with asyncio.timeout(180):
                while len(seen) < after:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            os.kill(server.pid, signal.SIGKILL)
            async with asyncio.timeout(120):
                await asyncio.gather(*agents)

    asyncio.run(ask())
    server.wait(120)
    checked = run.aglite("db", "check", "--dir", str(where))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tokenizer = TextTokenizer(run.folder / "model")
    store = Store.open(where / "aglite.db", readonly=True)
    kept: dict[str, list[tuple[str, int]]] = {}
    for rollout in store.rollouts():
        for call in store.calls(rollout["id"]):
            text = tokenizer.decode(call.response_ids.tolist(), skip_special_tokens=True)
            assert len(call.logprobs) == len(call.response_ids)
            kept.setdefault(store.messages(call)[-1]["content"], []).append((text.strip(), len(call.response_ids)))
    store.close()
    assert len(seen) >= after
    for asked, text, tokens in seen:
        assert kept.get(asked) == [(text.strip(), tokens)], asked
    server, url = _start(run, where)  # and it goes on from there
    try:
        reply = httpx.post(
            f"{url}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "again"}], "max_tokens": 4},
            headers={"authorization": "Bearer a0"},
            timeout=120,
        )
        assert reply.status_code == 200
    finally:
        os.kill(server.pid, signal.SIGINT)
        server.wait(120)
