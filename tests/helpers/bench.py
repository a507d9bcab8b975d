"""What the rollout tests share: a recipe in a folder, a real store and launcher, and a stand-in for the gateway."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aglite.rollouts.reap_child as reap_child
from aglite.config import parse_recipe
from aglite.paths import RunDir, new_id
from aglite.rollouts.launcher import Launcher, Outcome
from aglite.store import Store

GRADE = "def grade(task, rollout, workdir):\n    return 1.0 if rollout['exit_code'] == 0 else 0.25\n"


class StandInSession:
    def __init__(self, rollout_id: str) -> None:
        self.token = secrets.token_hex(8)
        self.token_hash = hashlib.sha256(self.token.encode()).digest()
        self.path = f"/rollouts/{rollout_id}"
        self.is_ready: Callable[[], Any] = lambda: True
        self._held_s = 0.0
        self._asked: float | None = None
        self.calls = 1
        self.sampled_tokens = 0
        self.limits_hit: set[str] = set()
        self.infra_error: str | None = None

    @property
    def held_s(self) -> float:
        """See `Bench.count_time_from`."""
        now = time.monotonic()
        self._asked = self._asked or now
        if not self.is_ready():
            self._held_s = now - self._asked
        return self._held_s

    @held_s.setter
    def held_s(self, seconds: float) -> None:
        self._held_s = seconds


class StandInGateway:
    """Sessions without a server; `on_open(session, number)` may dress the session of the nth attempt."""

    model_name = "test-model"
    context_length = 4096

    def __init__(self) -> None:
        self.open: dict[str, StandInSession] = {}
        self.opened: list[dict[str, Any]] = []
        self.on_open = lambda session, number: None

    def open_session(self, rollout_id, attempt, limits, sampling, seed=None):
        assert rollout_id not in self.open
        session = self.open[rollout_id] = StandInSession(rollout_id)
        self.opened.append({"id": rollout_id, "attempt": attempt, "sampling": sampling, "seed": seed})
        self.on_open(session, len(self.opened))
        return session

    async def close_session(self, rollout_id):
        self.open.pop(rollout_id, None)


async def stand_in_serve(sock: socket.socket) -> asyncio.Server:
    """Answers whatever connects to a socket in the gateway's place."""

    async def answer(reader, writer):
        await reader.readline()
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nthe gateway\n")
        writer.close()

    return await asyncio.start_server(answer, sock=sock)


class Bench:
    """A launcher over a recipe made from the source of an agent and of a grader."""

    def __init__(
        self,
        folder: Path,
        agent: str = "",
        *,
        grade: str = GRADE,
        reward: dict[str, Any] | None = None,
        gateway: Any = None,
        store: Store | None = None,
        url: str = "http://127.0.0.1:1",
        serve: Any = None,
        **agent_section: Any,
    ) -> None:
        if "image" in agent_section:  # a sidecar is made for each slot
            agent_section = {"concurrency": 2, **agent_section}
        recipe_dir = folder / "recipe"
        recipe_dir.mkdir(exist_ok=True)
        (recipe_dir / "agent.py").write_text(textwrap.dedent(agent))
        (recipe_dir / "grade.py").write_text(textwrap.dedent(grade))
        self.recipe = parse_recipe(
            {
                "name": "bench",
                "model": "none",
                "tasks": {"train": "train.jsonl", "val": "val.jsonl"},
                "agent": {"command": ["python", "agent.py"], **agent_section},
                "reward": {"grade": "grade.py:grade", "timeout_s": 120, **(reward or {})},
                **({"gateway": {"public_url": url}} if agent_section.get("backend") == "kubernetes" else {}),
            },
            recipe_dir / "recipe.yaml",
        )
        self.run_dir = RunDir(folder / "run")
        self.run_dir.create()
        self._group = new_id("g")
        self._owns_store = store is None
        self.store = store or Store.open(self.run_dir.db)
        self.gateway = gateway or StandInGateway()
        self.changes: list[dict[str, Any]] = []
        self.launcher = Launcher(
            self.store,
            self.gateway,
            self.recipe,
            self.run_dir,
            lambda: url,
            self.changes.append,
            serve=serve or stand_in_serve,
            backoff_s=0.05,
        )

    async def __aenter__(self) -> Bench:
        await self.launcher.start()
        await self.store.add_group(self._group, "t", "train", 1000)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.launcher.stop()
        for change in self.changes:  # what a test that fails shows of earlier attempts
            print({key: value for key, value in change.items() if value not in (None, "", [], {})}, file=sys.stderr)
        if self._owns_store:
            self.store.close()
        assert self.alive() == []
        assert list(self.run_dir.scratch.iterdir()) == []
        assert not getattr(self.gateway, "open", {})

    async def submit(
        self,
        public: dict[str, Any] | None = None,
        split: str = "train",
        id: str = "t",
        hidden: dict[str, Any] | None = None,
        **more: Any,
    ) -> asyncio.Task:
        rollout_id = new_id("r")
        await self.store.add_rollout(rollout_id, "t", self._group, split, self.recipe.agent.backend)
        task = {"id": id, "public": public or {}, "hidden": hidden or {"answer": "42"}}
        submitted = self.launcher.submit(rollout_id, task, split, **more)
        submitted.rollout_id = rollout_id
        return submitted

    async def run(self, public: dict[str, Any] | None = None, **more: Any) -> Outcome:
        """One rollout to its end, its row in the store checked against the outcome."""
        submitted = await self.submit(public, **more)
        self.last = submitted.rollout_id
        outcome = await submitted
        row = self.store.rollout(self.last)
        seen = (row["state"], row["cause"], row["reward"], row["breakdown"], row["flags"], row["attempt"])
        assert seen == (
            outcome.state,
            outcome.cause,
            outcome.reward,
            outcome.breakdown,
            outcome.flags,
            outcome.attempt,
        )
        return outcome

    def count_time_from(self, is_ready: Callable[[], Any]) -> None:
        """Let `limits.wall_s` run out only once an agent is ready: on a busy machine a Python takes seconds to start,
        and a test of what an agent does at the end of its time wants it to have begun."""
        self.gateway.on_open = lambda session, number: setattr(session, "is_ready", is_ready)

    def has_printed(self, text: str) -> bool:
        """Whether the last rollout's first attempt has."""
        path = self.run_dir.rollout_log(self.last, 1)
        return path.exists() and text in path.read_text(errors="replace")

    def states(self, rollout_id: str | None = None) -> list[str]:
        return [row["state"] for row in self.store.rollout_states(rollout_id or self.last)]

    def log(self, attempt: int = 1) -> str:
        return self.run_dir.rollout_log(self.last, attempt).read_text()

    def alive(self) -> list[int]:
        """Processes of this run's rollouts."""
        ending = os.fsencode(f"@{self.run_dir.path.resolve()}\0")
        return reap_child.find(lambda environ: ending in environ and b"AGLITE_ROLLOUT_ID" in environ)


async def until(condition, timeout_s: float = 60.0):
    """Poll a condition of the test's; its value once it is true. The time is for busy machines: it is over as soon as
    it holds."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not (value := condition()):
        assert asyncio.get_running_loop().time() < deadline, "waited in vain"
        await asyncio.sleep(0.02)
    return value


def descriptors() -> list[str]:
    """What this process has open. Each thread that reads the store has a connection of its own to `aglite.db`."""
    listing = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in listing if os.path.lexists(link)]


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
