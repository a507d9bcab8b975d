"""Several system messages, also in the middle, on families of models that take only one: Codex and Claude Code send
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from staging import running
from test_gateway_text import QWEN3_MARKERS
from tiny import tiny_model

from aglite.gateway.renderers import PackageRenderer
from aglite.gateway.tokenizer import TextTokenizer

MARKERS = [
    *QWEN3_MARKERS,
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    *("<|start_header_id|>", "<|end_header_id|>"),
]
TOOLS: list[Any] = [{"type": "function", "name": "f", "description": "f", "parameters": {"type": "object"}}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(tiny_model(tmp_path_factory.mktemp("m") / "m", markers=MARKERS))


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "llama-3"])
async def test_all_of_them_reach_the_model(family: str, tokenizer: TextTokenizer, tmp_path: Path) -> None:
    renderer = PackageRenderer(tokenizer, family, "all" if family != "llama-3" else None)
    think = "hm\n</think>\n\n" if family == "qwen3.5" else ""
    async with running(tmp_path, renderer) as stage:
        stage.engine.script = {"replies": [{"texts": [f"{think}{word}" for word in ("one", "two", "three")]}]}
        session = await stage.session()
        items: list[Any] = [
            {"role": "developer", "content": "permissions are given"},
            {"role": "developer", "content": "skills are known"},
            {"role": "user", "content": "the task"},
        ]
        for _ in range(3):
            reply = await stage.client(session).responses.create(
                model="m", instructions="be a coder", input=items, tools=TOOLS
            )
            items += [one.to_dict() for one in reply.output]
            items += [{"role": "developer", "content": "hurry up"}, {"role": "user", "content": "go on"}]
        calls = stage.calls(session)
        text = tokenizer.decode(calls[-1].prompt_ids)
        at = [text.index(words) for words in ("be a coder", "permissions are", "skills are", "the task", "hurry up")]
        assert at == sorted(at) and text.count("hurry up") == 2
        assert [call.fork_cause for call in calls] == ["first", "", ""]
        assert [call.parent_id for call in calls] == [None, calls[0].id, calls[1].id]
