"""OpenCode: ten tools, Chat Completions as a stream, compaction by itself."""

from __future__ import annotations

import json

from aglite.harnesses.base import Harness, Kit, Order, room_for_reply


def kit(order: Order) -> Kit:
    patience_ms = round(order.max_hold_s + 60) * 1000
    model = {
        "name": order.model,
        "limit": {"context": order.context_length, "output": room_for_reply(order.context_length)},
        "tool_call": True,
    }
    options = {
        "baseURL": f"{order.url}/v1",
        "apiKey": order.token,
        "timeout": False,
        "headerTimeout": patience_ms,
        "chunkTimeout": patience_ms,
    }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "enabled_providers": ["aglite"],
        "provider": {
            "aglite": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "aglite",
                "options": options,
                "models": {order.model: model},
            }
        },
        "model": f"aglite/{order.model}",
        "small_model": f"aglite/{order.model}",
        "permission": {"*": "allow"},
    }
    return Kit(
        # With a title given, it asks the model for none.
        command=["opencode", "run", "--format=json", "--title=task", *order.args],
        env={
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_SHARE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        },
        files={".config/opencode/opencode.json": json.dumps(settings, indent=1)},
        # As an argument it would be put in quotes, or taken for a number.
        stdin=order.prompt,
    )


HARNESS = Harness(
    name="opencode",
    program="opencode",
    package="opencode-ai",
    version="1.18.33",
    installer="npm",
    dialect="chat",
    kit=kit,
)
