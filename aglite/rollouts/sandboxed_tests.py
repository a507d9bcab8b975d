"""Tests of what an agent made, in a container: their launch, and what is made of their report."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aglite.config import Limits
from aglite.paths import ROLLOUT_ID
from aglite.redact import Redactor
from aglite.rollouts import pytest_child
from aglite.rollouts.backends import Launch
from aglite.rollouts.grade_child import outcomes, verdict
from aglite.rollouts.sandboxed import NotRun, Start, run

OURS = ".aglite-tests"
"""Folder in the working directory for what the test runner needs."""

REPORT_BYTES = 16 << 20
BEGUN_S = 30.0
"""What a container may take to import pytest, on top of the time limit."""


async def run_tests(
    start: Start,
    plan: Mapping[str, Any],
    name: str,
    work: Path,
    tmp: Path,
    *,
    python: str,
    limits: Limits,
    timeout_s: float,
    log: Path,
    redactor: Redactor,
    stop: asyncio.Future[Any],
) -> dict[str, Any] | None:
    """What grade_child.py would give for `plan` on the copy `work`; None if `stop` was done first. What is printed goes
    to the file `log`. Raises NotRun."""
    token = secrets.token_hex(16)
    plan = {**plan, "token": token, "root": ".", "ini": f"{OURS}/pytest.ini"}
    (tmp / "plan.json").write_text(json.dumps(plan))
    launch = Launch(
        rollout_id=name,
        attempt=1,
        command=[python, "-I", "-B", f"{OURS}/run.py", f"{OURS}/plan.json", f"{OURS}/report"],
        files=[
            (Path(pytest_child.__file__), f"{OURS}/run.py"),
            *((tmp / file, f"{OURS}/{file}") for file in ("plan.json", "pytest.ini")),
        ],
        home_files={},
        stdin="",
        task={},
        env={ROLLOUT_ID: name, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        limits=limits,
        log=log,
        redactor=redactor,
        tree=work,
    )
    async with run(start, launch, timeout_s + BEGUN_S, stop) as ran:
        if stop.done():
            return None
        report = await asyncio.to_thread(_report, ran.running.workdir / OURS / "report")
        passed, failed, started = outcomes(report, token)
        if not started and not ran.late:
            raise NotRun(f"pytest did not start in the container: {ran.running.last_line}")
        result = verdict(plan, passed, failed, ran.late)
        if ran.out_of_memory:
            result["flags"].append("grader_memory")
        return result


def _report(file: Path) -> bytes:
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as report:
            return report.read(REPORT_BYTES)
    except OSError:
        return b""
