"""Claude Code: about two dozen tools, the Messages API as a stream, compaction by the context it believes in."""

from __future__ import annotations

from aglite.harnesses.base import Harness, Kit, Order, room_for_reply


def kit(order: Order) -> Kit:
    patience_ms = str(round(order.max_hold_s + 60) * 1000)
    return Kit(
        command=[
            "claude",
            "--print",
            "--output-format=json",
            "--dangerously-skip-permissions",
            f"--model={order.model}",
            *order.args,
            "--",
            order.prompt,
        ],
        env={
            # It refuses to skip permissions as root unless it is told that somebody else contains it.
            "IS_SANDBOX": "1",
            **{
                f"ANTHROPIC_DEFAULT_{size}_MODEL": order.model for size in ("OPUS", "SONNET", "HAIKU")
            },  # sub-agents and side calls ask for these
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(order.context_length),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(room_for_reply(order.context_length)),
            "API_TIMEOUT_MS": patience_ms,
            # Its runtime would close a connection that is silent for 300 s.
            "API_FORCE_IDLE_TIMEOUT": "0",
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": patience_ms,
            "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS": patience_ms,
            # A block of the system prompt that is another in every launch.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_COST_WARNINGS": "1",
        },
    )


HARNESS = Harness(
    name="claude-code",
    program="claude",
    package="@anthropic-ai/claude-code",
    version="2.1.197",
    installer="npm",
    dialect="anthropic",
    kit=kit,
)
