"""Agents that write down what they see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench import Bench

SEEN = """
    import json, os, socket
    def line(name):
        return next(l.split(":")[1].strip() for l in open("/proc/self/status") if l.startswith(name + ":"))
    def connects(host, port):
        try:
            socket.create_connection((host, port), timeout=20).close()
        except OSError as error:
            return str(error)
        return "connected"
    def writes(path):
        try:
            open(path, "w").close()
        except OSError as error:
            return error.strerror
        return "written"
"""
PASS_ON = """
    import shutil
    def grade(task, rollout, workdir):
        shutil.copy(workdir / "seen.json", task["public"]["out"])
        return 1.0
"""


async def what_is_seen(tmp_path: Path, agent: str, public: dict[str, Any] | None = None, **agent_section: Any) -> Any:
    """The `seen.json` that an agent writes."""
    out = tmp_path / "seen.json"
    async with Bench(tmp_path, SEEN + agent, grade=PASS_ON, **agent_section) as bench:
        outcome = await bench.run({"out": str(out), **(public or {})})
        assert outcome.state == "done", (outcome, bench.log())
    return json.loads(out.read_text())
