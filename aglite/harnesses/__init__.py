"""Presets: what makes a well-known agent program run against the gateway, so that a recipe needs only its name.

One file a program. What each setting is for, and what was measured with which version, is in docs/harnesses.md.
"""

from __future__ import annotations

from aglite.harnesses import claude_code, codex, mini_swe_agent, opencode, openhands
from aglite.harnesses.base import Harness, Kit, Order

HARNESSES: dict[str, Harness] = {
    module.HARNESS.name: module.HARNESS for module in (mini_swe_agent, openhands, opencode, codex, claude_code)
}
"""By the name that `agent.harness` takes."""

__all__ = ["HARNESSES", "Harness", "Kit", "Order"]
