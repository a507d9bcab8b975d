"""A control API with canned answers, in the shapes of aglite/control/shapes, on a real socket."""

from __future__ import annotations

import json
import os
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from aglite.paths import RunDir

TOKEN = "t0ken"
NOW = 1_790_000_000.0
"""The fixed clock of the scenes."""
GIB = 2**30

TASKS = ("kw-lantern-4", "json-miriam-31", "list-rivers-3", "kw-harbor-6", "json-oduya-58", "list-metals-4")


class FakeDaemon:
    """Serves a scene (`status`, `rollouts`, `details`, `events`) for `run_dir`, and remembers what was posted."""

    def __init__(self, run_dir: RunDir, scene: dict[str, Any], *, pid: int | None = None, token: str = TOKEN) -> None:
        self.scene = scene
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.asked: list[str] = []
        self.refuse: dict[str, tuple[int, dict[str, Any]]] = {}
        """Path -> (status, body) that it answers with an error."""
        self.run_dir = run_dir
        self.token = token
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        run_dir.path.mkdir(parents=True, exist_ok=True)
        run_dir.control.write_text(json.dumps({"url": self.url, "token": token, "pid": pid or os.getpid()}))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def go_silent(self) -> None:
        """Stop answering, as a supervisor that hangs or was cut off: control.json stays."""
        self._server.shutdown()
        self._server.server_close()

    def end(self) -> None:
        """End as a supervisor does: control.json goes too."""
        self.go_silent()
        self.run_dir.control.unlink(missing_ok=True)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        daemon = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def _reply(self, status: int, body: Any) -> None:
                payload = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def _refused(self) -> bool:
                path = urlsplit(self.path).path
                if self.headers.get("Authorization") != f"Bearer {daemon.token}":
                    self._reply(401, {"detail": "the admin token of control.json is wanted as Authorization: Bearer"})
                elif path in daemon.refuse:
                    self._reply(*daemon.refuse[path])
                else:
                    return False
                return True

            def do_GET(self) -> None:
                daemon.asked.append(self.path)
                if self._refused():
                    return
                address = urlsplit(self.path)
                query = {key: values[0] for key, values in parse_qs(address.query).items()}
                if address.path == "/api/status":
                    self._reply(200, daemon.scene["status"])
                elif address.path == "/api/rollouts":
                    rows = daemon.scene["rollouts"]
                    if "step" in query:
                        rows = [row for row in rows if row["state"] == "done" and row["policy_version_min"] == 3]
                    if "state" in query:
                        rows = [row for row in rows if row["state"] == query["state"]]
                    self._reply(200, rows[: int(query.get("limit", 200))])
                elif address.path in ("/api/steps", "/api/recipe", "/api/sandboxes"):
                    self._reply(200, daemon.scene[address.path.rpartition("/")[2]])
                elif address.path.endswith("/tokens"):
                    self._reply(
                        200, daemon.scene["tokens"] if address.path.split("/")[3] in daemon.scene["details"] else []
                    )
                elif address.path.startswith("/api/rollouts/"):
                    name = address.path.rpartition("/")[2]
                    detail = daemon.scene["details"].get(name)
                    if detail is None:
                        self._reply(409, {"detail": f"no rollout {name}", "mend": "see `aglite rollouts`"})
                    else:
                        self._reply(200, detail)
                elif address.path == "/api/events":
                    self._events(int(query.get("after", 0)))
                else:
                    self._reply(404, {"detail": "Not Found"})

            def _events(self, after: int) -> None:
                """At most two events a connection: the client has to come back with its cursor."""
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                self.wfile.write(b": hello\n\n")
                for event in [event for event in daemon.scene["events"] if event["id"] > after][:2]:
                    self.wfile.write(f"id: {event['id']}\ndata: {json.dumps(event)}\n\n".encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                if self._refused():
                    return
                action = urlsplit(self.path).path.removeprefix("/api/")
                daemon.posted.append((action, body))
                if action == "pause":
                    daemon.scene["status"] |= {"phase": "paused", "message": "paused: asked for"}
                if action == "concurrency":
                    daemon.scene["status"]["concurrency"] = body["rollouts"]
                if action.startswith("tasks/") and action.endswith("/quarantine"):
                    daemon.scene["status"]["quarantined"] = [unquote(action.split("/")[1])]
                if action == "resume":
                    daemon.scene["status"] |= {"phase": "rollout", "message": ""}
                self._reply(200, {"state": action})

        return Handler


def rollout(number: int, state: str, draw: random.Random, **more: Any) -> dict[str, Any]:
    """One rollout; higher numbers are newer."""
    created = NOW - 900 + 9 * number
    ended = state in ("done", "failed", "error", "cancelled")
    begun = state != "queued"
    calls = draw.choice((1, 1, 2)) if ended else (1 if state in ("running", "grading") else 0)
    reward = draw.choice((0.0, 0.2, 0.8, 1.0, 1.0)) if state in ("done", "failed") else None
    version = max(number // 30, 0)
    return {
        "id": f"r-{draw.getrandbits(40):010x}",
        "task_id": TASKS[number // 6 % len(TASKS)],
        "group": f"g-{random.Random(number // 6).getrandbits(40):010x}",
        "split": "train",
        "state": state,
        "cause": {"failed": "wall_time: 120 s", "error": "engine: the model worker was lost"}.get(state, ""),
        "attempt": 2 if state == "error" else int(begun),
        "backend": "local",
        "calls": calls,
        "samples": calls if ended and reward is not None else 0,
        "prompt_tokens": 61 * calls,
        "sampled_tokens": 23 * calls + draw.randrange(9) * calls,
        "trained_tokens": 23 * calls if ended else 0,
        "policy_version_min": version if calls else None,
        "policy_version_max": version + int(number % 7 == 0) if calls else None,
        "reward": reward,
        "breakdown": {"word": reward, "length": 1.0} if reward is not None else {},
        "flags": [],
        "created_at": created,
        "started_at": created + 4 if begun else None,
        "finished_at": created + 16 if ended else None,
    } | more


def rollouts(count: int, draw: random.Random) -> list[dict[str, Any]]:
    """`count` rollouts, newest first: the last ones queued and running, some older ones failed."""
    rows = []
    for number in range(count):
        left = count - number
        if left <= 12:
            state = "queued"
        elif left <= 20:
            state = "grading" if left == 20 else "starting" if left == 13 else "running"
        else:
            state = "failed" if number % 23 == 5 else "error" if number % 61 == 9 else "done"
        more = {"created_at": NOW - 60 + number % 12, "started_at": NOW - left} if 12 < left <= 20 else {}
        rows.append(rollout(number, state, draw, **more))
    return rows[::-1]


def event(id: int, ago: float, kind: str, text: str, level: str = "info", **data: Any) -> dict[str, Any]:
    return {"id": id, "at": NOW - ago, "level": level, "kind": kind, "text": text, "data": data}


def step_event(id: int, ago: float, step: int, mean: float) -> dict[str, Any]:
    metrics = {"reward_mean": mean, "reward_std": 0.31, "rollouts": 24, "trained_tokens": 1180, "kl_rollout": 4.1e-4}
    return event(id, ago, "step", f"step {step}", step=step, state="applied", seconds=27.0, **metrics)


def running() -> dict[str, Any]:
    """A run in the middle of its training."""
    draw = random.Random(7)
    rows = rollouts(172, draw)
    means = (0.21, 0.26, 0.38, 0.44, 0.57, 0.61, 0.66)
    queue = dict.fromkeys(("queued", "starting", "running", "grading", "done", "failed", "error", "cancelled"), 0)
    for row in rows:
        queue[row["state"]] += 1
    events = [
        event(1, 610, "phase", "starting", phase="starting"),
        event(2, 580, "phase", "evaluating: before training", phase="evaluating"),
        event(3, 541, "evaluation", "validation 0.208 ± 0.041 on 64 tasks (before training)"),
        *(step_event(3 + i, 520 - 62 * i, i, mean) for i, mean in enumerate(means[:6], 1)),
        event(10, 120, "evaluation", "validation 0.571 ± 0.052 on 64 tasks (after step 6)"),
        event(11, 101, "rollout", "r-09c1d7e2aa: attempt 1 lost its worker, trying again", "warning"),
        step_event(12, 41, 7, means[6]),
        event(13, 40, "checkpoint", "checkpoint step-7 (asked for)"),
        event(14, 34, "phase", "rollout", phase="rollout"),
    ]
    status = {
        "run": "instruct",
        "recipe": "instruct",
        "model": "smollm2-135m",
        "dir": "runs/instruct",
        "pid": 4242,
        "mode": "async",
        "started_at": NOW - 610,
        "now": NOW,
        "phase": "rollout",
        "phase_since": NOW - 34,
        "message": "",
        "policy_version": 7,
        "step": 7,
        "steps": 12,
        "eta_s": 311.0,
        "last_update_s": 29.4,
        "max_hold_s": 240,
        "gate": {"state": "open", "held": 0},
        "queue": queue,
        "groups": {"open": 8, "complete": 1},
        "concurrency": 8,
        "quarantined": [],
        "phases": phases(),
        "engine": {
            "kind": "embedded",
            "running": 7,
            "waiting": 1,
            "tokens_per_s": 63.4,
            "sampled_tokens": 9214,
            "prefill_tokens": 11830,
            "reused_tokens": 21877,
            "kv_tokens": 9830,
            "kv_capacity": 32768,
        },
        "training": {},
        "reward": [{"step": i, "mean": mean, "std": 0.31} for i, mean in enumerate(means, 1)],
        "val": [
            {"step": 0, "mean": 0.208, "stderr": 0.041, "n": 64},
            {"step": 6, "mean": 0.571, "stderr": 0.052, "n": 64},
        ],
        "entropy": [{"step": i, "value": 1.9 - 0.1 * i} for i in range(1, 8)],
        "kl": [{"step": i, "value": (2.1, 3.4, 2.9, 4.4, 6.0, 3.8, 4.1)[i - 1] * 1e-4} for i in range(1, 8)],
        "checkpoint": {"step": 7, "at": NOW - 40},
        "gpu": [],
        "host": {
            "cpu_percent": 97.0,
            "cpus": 2,
            "ram_used": int(4.6 * GIB),
            "ram_total": int(15.6 * GIB),
            "disk_free": 181 * GIB,
            "db_bytes": 5_400_000,
        },
        "log": events,
    }
    return {
        "status": status,
        "rollouts": rows,
        "details": {row["id"]: detail(row) for row in rows},
        "events": events,
        "steps": [step(i, mean) for i, mean in enumerate(means, 1)],
        "recipe": recipe(),
        "sandboxes": [
            sandbox(row, i) for i, row in enumerate(rows) if row["state"] in ("starting", "running", "grading")
        ],
        "tokens": tokens(),
    }


def phases() -> list[dict[str, Any]]:
    """The last ten minutes: the start, an evaluation, then rollouts and updates in turn."""
    spans = [("starting", 610), ("evaluating", 580), ("rollout", 541)]
    for ago in (520, 458, 396, 334, 272, 210):
        spans += [("draining", ago + 30), ("training", ago + 29), ("syncing", ago + 2), ("rollout", ago)]
    spans += [
        ("evaluating", 150),
        ("rollout", 120),
        ("draining", 62),
        ("training", 61),
        ("syncing", 36),
        ("rollout", 34),
    ]
    ends = [ago for _, ago in spans[1:]]
    return [
        {"phase": phase, "started_at": NOW - ago, "finished_at": None if end is None else NOW - end}
        for (phase, ago), end in zip(spans, [*ends, None], strict=True)
    ]


def step(number: int, mean: float) -> dict[str, Any]:
    """A training step as `GET /api/steps` gives it; the third was skipped."""
    skipped = number == 3
    metrics = {
        "reward_mean": mean,
        "reward_std": 0.31,
        "groups": 4,
        "zero_advantage_groups": 4 if skipped else number % 3,
        "samples": 28 + number,
        "samples_per_rollout": 1.2,
        "samples_per_rollout_max": 2,
        "merge_rate": 0.31,
        "encoded_tokens": 3900,
        "trained_tokens": 1180 + 40 * number,
        "encoded_per_trained": 3.2,
        "staleness_mean": 0.4 + 0.2 * number,
        "staleness_p95": 2,
        "staleness_max": 3,
        "rollouts": 24,
        "rollouts_trained": 24,
        "rollouts_stale": int(number == 6),
        "rollouts_without_tokens": 0,
        "rollouts_lost": 0,
        "samples_zero_advantage": 6,
        "calls": 33,
        "calls_without_loss": 0,
        "calls_constrained": 0,
        "forks": {"continued": 5, "first": 24, "new_thread": 4, "edited": 0, "template": 0, "retokenised": 0},
        "lr": 5e-5,
        "groups_dropped": 0,
        "causes": {"wall_time": 1} if number == 4 else {},
    }
    if not skipped:
        metrics |= {
            "loss": -0.0021,
            "grad_norm": 0.41 + 0.02 * number,
            "entropy": 1.9 - 0.1 * number,
            "kl_rollout": 4e-4,
            "logprob_gap_mean": 2.1e-6,
            "logprob_gap_max": 3.9e-5,
            "seconds": 26.4,
        }
    return {
        "id": number,
        "step": number,
        "version": number - int(number >= 3),
        "state": "skipped" if skipped else "applied",
        "metrics": metrics,
        "started_at": NOW - 548 + 62 * number,
        "finished_at": NOW - 520 + 62 * number,
    }


def recipe() -> list[dict[str, Any]]:
    """A recipe as `GET /api/recipe` explains it: its first settings and those that differ from the defaults, so that
    pictures stay as they are when there is a new one."""
    from aglite.config import Recipe
    from aglite.config.explain import explained

    rows = explained(
        Recipe(
            name="instruct",
            model="smollm2-135m",
            tasks={"train": "tasks.py:train", "val": "tasks.py:val"},
            agent={"command": ["python", "agent.py"], "limits": {"calls": 8, "sampled_tokens": 2048}},
            reward={"grade": "grade.py:grade"},
            algorithm={"group_size": 6, "groups_in_flight": 8},
            trainer={"steps": 12, "lr": 5e-5},
        ).dump()
    )
    return [row for number, row in enumerate(rows) if number < 60 or row["differs"]]


def sandbox(row: dict[str, Any], number: int) -> dict[str, Any]:
    return {
        "rollout_id": row["id"],
        "task_id": row["task_id"],
        "split": row["split"],
        "state": row["state"],
        "attempt": row["attempt"],
        "begun": row["started_at"],
        "pid": 5000 + number if row["state"] != "starting" else None,
        "container": None,
        "workdir": None,
        "backend": "local",
        "age_s": NOW - row["started_at"],
        "leaked": False,
        "processes": 1 + number % 2,
        "cpu_s": 0.4 * number,
        "memory": (30 + 7 * number) * 2**20,
    }


def leaked(rollout_id: str) -> dict[str, Any]:
    row = rollout(1, "running", random.Random(1), id=rollout_id)
    return {
        **sandbox(row, 3),
        "task_id": "",
        "split": "",
        "state": "leaked",
        "attempt": 0,
        "leaked": True,
        "age_s": 820.0,
    }


def tokens() -> list[dict[str, Any]]:
    """Two samples, the second shorter, as `GET /api/rollouts/{id}/tokens` gives them."""
    prompt = ["<|im_start|>", "user", "\n", "Write", " one", " sentence", " with", " the", " word", " lantern", ".",
              "<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]  # fmt: skip
    reply = ["The", " lantern", " glows", " soft", "ly", " in", " the", " harbor", " night", ".", "<|im_end|>"]
    values = [-0.02, -1.2, -0.4, -2.9, -0.01, -0.6, -0.1, -1.7, -0.9, -0.03, -0.2]
    samples = []
    for start, call in ((0, 101), (4, 102)):
        said, scores = reply[start:], values[start:]
        texts = [*prompt, *said]
        blank = [0] * len(prompt)
        samples.append(
            {
                "calls": [[call, 1]],
                "ids": list(range(100, 100 + len(texts))),
                "texts": texts,
                "mask": [*blank, *[1] * len(said)],
                "logprobs": [*map(float, blank), *scores],
                "versions": [*[-1] * len(prompt), *[3 if i < 4 else 4 for i in range(len(said))]],
                "constrained": [0] * len(texts),
            }
        )
    return samples


def empty() -> dict[str, Any]:
    """A run that is still loading its model."""
    scene = running()
    events = scene["status"]["log"][:1]
    scene["status"] |= {
        "phase": "starting",
        "phase_since": NOW - 3,
        "message": "loading weights",
        "policy_version": 0,
        "step": 0,
        "eta_s": None,
        "last_update_s": 0.0,
        "queue": dict.fromkeys(scene["status"]["queue"], 0),
        "groups": {},
        "engine": {"kind": "embedded", "running": 0, "waiting": 0, "tokens_per_s": 0.0},
        "reward": [],
        "val": [],
        "entropy": [],
        "kl": [],
        "checkpoint": None,
        "phases": [{"phase": "starting", "started_at": NOW - 3, "finished_at": None}],
        "log": events,
    }
    nothing = {"rollouts": [], "details": {}, "steps": [], "sandboxes": [], "tokens": []}
    return {**scene, "status": scene["status"], "events": events, **nothing}


def with_gpu(scene: dict[str, Any]) -> dict[str, Any]:
    scene["status"]["gpu"] = [
        {
            "name": "NVIDIA A100-SXM4-80GB",
            "util": 91,
            "mem_used": 61 * GIB,
            "mem_total": 80 * GIB,
            "power_w": 312.0,
            "processes": [
                {"pid": 4250, "name": "model worker", "mem": 58 * GIB},
                {"pid": 990, "name": "jupyter-lab", "mem": 2 * GIB},
            ],
            "temp_c": 61,
        }
    ]
    return scene


def detail(row: dict[str, Any]) -> dict[str, Any]:
    """A rollout in full: a draft, then a second call in a fresh context."""
    task = {"role": "user", "content": "Write one sentence of at most 12 words with the word lantern. End with ! or ?"}
    draft = "The lantern glows softly in the harbor night while the boats come home slowly."
    retry = {"role": "user", "content": f"{task['content']}\nThis is wrong: too long (14 words).\nTry again."}
    texts = ([task], draft), ([retry], "Did the lantern guide the boats home?")
    calls = []
    for number, (messages, reply) in enumerate(texts[: row["calls"]], 1):
        calls.append(
            {
                "id": 100 + number,
                "parent_id": None,
                "matched_id": None,
                "fork_cause": "first" if number == 1 else "new_thread",
                "dialect": "chat",
                "prompt_tokens": 58 if number == 1 else 79,
                "sampled_tokens": 17 if number == 1 else 10,
                "versions": [[row["policy_version_min"] or 0, 10]],
                "constrained": False,
                "finish_reason": "stop",
                "status": "ok",
                "error": "",
                "delivered": True,
                "held_s": 0.0,
                "started_at": row["started_at"] + 2 * number,
                "first_token_at": row["started_at"] + 2 * number + 0.4,
                "finished_at": row["started_at"] + 2 * number + 1.7,
                "messages": messages,
                "reply": {"role": "assistant", "content": reply},
                "fork_diff": None,
            }
        )
    log = "task kw-lantern-4\ndraft: 14 words, wants at most 12\nrevising (fresh)\naccepted\n" if row["calls"] else ""
    return {
        **row,
        "task": {"id": row["task_id"], "public": {"kind": "keyword"}, "hidden": {}},
        "states": states(row),
        "call_rows": calls,
        "sample_rows": [],
        "judge_calls": [],
        "log_tail": log,
    }


def states(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What a rollout went through on its way to its state."""
    way = [("queued", row["created_at"]), ("starting", row["started_at"]), ("running", (row["started_at"] or 0) + 0.4)]
    if row["finished_at"]:
        way += [("grading", row["finished_at"] - 1), (row["state"], row["finished_at"])]
    cause = {row["state"]: row["cause"]}
    return [
        {"attempt": row["attempt"] if at else 0, "state": state, "cause": cause.get(state, ""), "at": at}
        for state, at in way
        if (at is not None and row["attempt"]) or state == "queued"
    ]


SCENES = {"running": running, "empty": empty, "gpu": lambda: with_gpu(running())}


def main() -> None:
    """`python fake_daemon.py RUN_DIR SCENE`: serve a scene until standard input closes."""
    import sys

    daemon = FakeDaemon(RunDir(Path(sys.argv[1])), SCENES[sys.argv[2]]())
    print(daemon.url, flush=True)
    sys.stdin.read()
    daemon.end()


if __name__ == "__main__":
    main()
