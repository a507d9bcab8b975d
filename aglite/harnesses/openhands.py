"""OpenHands CLI: terminal, editor and task list; Chat Completions without streaming; a condenser for compaction."""

from __future__ import annotations

import json
from typing import Any

from aglite.harnesses.base import Harness, Kit, Order

SKILLS = "https://github.com/OpenHands/extensions"
"""The repository that every launch would clone."""


def kit(order: Order) -> Kit:
    return Kit(
        command=["openhands", "--headless", "--json", *order.args, f"--task={order.prompt}"],
        env={
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            # A context below 16,384 tokens would be refused.
            "ALLOW_SHORT_CONTEXT_WINDOWS": "true",
            # No setting leaves the public skills out; a clone from nowhere fails at once.
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "url.file:///nonexistent/.insteadOf",
            "GIT_CONFIG_VALUE_0": SKILLS,
        },
        files={".openhands/agent_settings.json": json.dumps(_agent(order), indent=1)},
    )


def _agent(order: Order) -> dict[str, Any]:
    """What its settings screen would have saved. The environment can give it the address, but no time limit."""
    llm = {
        "model": f"openai/{order.model}",
        "base_url": f"{order.url}/v1",
        "api_key": order.token,
        "timeout": round(order.max_hold_s + 60),
        "max_input_tokens": order.context_length,
        "input_cost_per_token": 0.0,
        "output_cost_per_token": 0.0,
    }
    condenser = {
        "kind": "LLMSummarizingCondenser",
        "llm": {**llm, "usage_id": "condenser"},
        "max_size": 80,
        "keep_first": 4,
    }
    return {"kind": "Agent", "llm": {**llm, "usage_id": "agent"}, "tools": [], "condenser": condenser}


HARNESS = Harness(
    name="openhands",
    program="openhands",
    package="openhands",
    version="1.16.0",
    installer="pip",
    dialect="chat",
    kit=kit,
)
