"""A command that grades what an agent made, in a container: its launch, and what is made of its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aglite.config import Limits
from aglite.paths import ROLLOUT_ID
from aglite.redact import Redactor
from aglite.rollouts.backends import Launch
from aglite.rollouts.backends.contained import FOLDER
from aglite.rollouts.grade_child import command_result
from aglite.rollouts.sandboxed import Start, run

CWD = "grader"
"""Folder beside the agent's working directory that stands for the recipe's."""


async def run_command(
    start: Start,
    request: Mapping[str, Any],
    name: str,
    work: Path,
    *,
    limits: Limits,
    timeout_s: float,
    log: Path,
    redactor: Redactor,
    stop: asyncio.Future[Any],
) -> dict[str, Any] | None:
    """What grade_child.py would give for a request of kind `command`. It runs among its own files only, and finds the
    copy `work` where the agent worked. None if `stop` was done first. Raises NotRun."""
    launch = Launch(
        rollout_id=name,
        attempt=1,
        command=request["argv"],
        files=[(Path(file), place) for file, place in request["files"]],
        home_files={"rollout.json": json.dumps(request["rollout"])},
        stdin="",
        task=request["task"],
        env={
            ROLLOUT_ID: name,
            "AGLITE_WORKDIR": f"{FOLDER}/work",
            "AGLITE_ROLLOUT_FILE": f"{FOLDER}/home/rollout.json",
        },
        limits=limits,
        log=log,
        redactor=redactor,
        tree=work,
        cwd=CWD,
    )
    async with run(start, launch, timeout_s, stop) as ran:
        if stop.done():
            return None
        if ran.out_of_memory:
            return {"value": 0.0, "flags": ["grader_memory"]}
        return command_result(request["result"], None if ran.late else ran.exit.code, ran.running.said)
