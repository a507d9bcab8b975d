"""Codex: a shell and a patch tool, the Responses API as a stream, compaction by the usage that is reported."""

from __future__ import annotations

import json

from aglite.harnesses.base import Harness, Kit, Order


def kit(order: Order) -> Kit:
    patience_ms = round(order.max_hold_s + 60) * 1000
    text = json.dumps  # a JSON string is a TOML string
    settings = f"""\
model = {text(order.model)}
model_provider = "aglite"
model_context_window = {order.context_length}
model_auto_compact_token_limit = {order.context_length * 4 // 5}
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.aglite]
name = "aglite"
base_url = {text(order.url + "/v1")}
env_key = "OPENAI_API_KEY"
wire_api = "responses"
supports_websockets = false
stream_idle_timeout_ms = {patience_ms}

[features]
apps = false
plugins = false

[analytics]
enabled = false

[feedback]
enabled = false

[history]
persistence = "none"
"""
    return Kit(
        command=[
            "codex",
            "exec",
            "--json",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            *order.args,
            "--",
            order.prompt,
        ],
        env={},
        files={".codex/config.toml": settings},
    )


HARNESS = Harness(
    name="codex",
    program="codex",
    package="@openai/codex",
    version="0.171.0",
    installer="npm",
    dialect="responses",
    kit=kit,
)
