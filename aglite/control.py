"""The control API: what the terminal, the command line and any other UI read and do. Loopback only, admin token."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Depends, FastAPI, Header, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, FiniteFloat

from aglite.errors import AgliteError, StoreError
from aglite.status import status

if TYPE_CHECKING:
    from aglite.supervisor import Supervisor

State = Literal["queued", "starting", "running", "grading", "done", "failed", "error", "cancelled"]
EVENT_POLL_S = 0.25
KEEP_ALIVE_S = 15.0

Cursor = Annotated[int, Query(ge=0, lt=2**63)]  # what SQLite takes for a number
Limit = Annotated[int, Query(ge=1, lt=2**31)]


class NewRollout(BaseModel):
    """A rollout that somebody else launches."""

    task: dict[str, Any]
    split: Literal["train", "val"] = "train"
    group: str | None = None


class FinishedRollout(BaseModel):
    """How it ended: a reward, or an infrastructure error."""

    reward: float | None = None
    breakdown: dict[str, FiniteFloat] = {}
    error: str | None = None


class StopRequest(BaseModel):
    now: bool = False


def create_control_app(supervisor: Supervisor, token: str) -> FastAPI:
    """The control API of one supervisor. Every /api route and /metrics want `token` as Bearer."""
    # no page of documentation: FastAPI's would load its scripts from the internet
    app = FastAPI(title="aglite control API", version="1", docs_url=None, redoc_url=None)

    def admin(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), token.encode()):
            raise HTTPException(401, "the admin token of control.json is wanted as Authorization: Bearer")

    guard = [Depends(admin)]
    store = supervisor.store

    @app.exception_handler(AgliteError)
    async def refused(_: Request, error: AgliteError) -> JSONResponse:
        return JSONResponse({"detail": error.message, "mend": error.mend}, status_code=409)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(explain(error), status_code=422)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/api/status", dependencies=guard)
    async def get_status() -> dict[str, Any]:
        return status(supervisor)

    @app.get("/api/rollouts", dependencies=guard)
    async def rollouts(
        state: State | None = None,
        step: Cursor | None = None,
        limit: Limit = 200,
        after: str | None = None,
    ) -> list[dict[str, Any]]:
        return store.rollouts(state=state, step=step, limit=limit, after=after)

    @app.get("/api/rollouts/{rollout_id}", dependencies=guard)
    async def rollout(rollout_id: str) -> dict[str, Any]:
        from aglite.show import rollout_detail

        try:
            return rollout_detail(store, supervisor.run_dir, rollout_id)
        except StoreError as error:
            raise HTTPException(404, error.message) from None

    @app.get("/api/steps", dependencies=guard)
    async def steps() -> list[dict[str, Any]]:
        return store.steps()

    @app.get("/api/events", dependencies=guard)
    async def events(
        after: Cursor = 0, last_event_id: Annotated[int | None, Header(ge=0, lt=2**63)] = None
    ) -> StreamingResponse:
        cursor = after if last_event_id is None else last_event_id
        return StreamingResponse(_events(supervisor, cursor), media_type="text/event-stream")

    @app.post("/api/pause", dependencies=guard)
    async def pause() -> dict[str, str]:
        return supervisor.ask("pause")

    @app.post("/api/resume", dependencies=guard)
    async def resume() -> dict[str, str]:
        return supervisor.ask("resume")

    @app.post("/api/checkpoint", dependencies=guard)
    async def checkpoint() -> dict[str, str]:
        return supervisor.ask("checkpoint")

    @app.post("/api/evaluate", dependencies=guard)
    async def evaluate() -> dict[str, str]:
        return supervisor.ask("evaluate")

    @app.post("/api/stop", dependencies=guard)
    async def stop(body: StopRequest | None = None) -> dict[str, str]:
        return supervisor.ask("stop now" if body and body.now else "stop")

    @app.post("/api/rollouts/{rollout_id}/kill", dependencies=guard)
    async def kill(rollout_id: str) -> dict[str, str]:
        await supervisor.kill(rollout_id)
        return {"state": "cancelled"}

    @app.post("/api/rollouts", dependencies=guard)
    async def open_external(body: NewRollout) -> dict[str, Any]:
        return await supervisor.external.open(body.task, body.split, body.group)

    @app.post("/api/rollouts/{rollout_id}/finish", dependencies=guard)
    async def finish_external(rollout_id: str, body: FinishedRollout) -> dict[str, Any]:
        return await supervisor.external.finish(rollout_id, body.reward, body.breakdown, body.error)

    @app.get("/metrics", dependencies=guard)
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(prometheus(status(supervisor)), media_type="text/plain; version=0.0.4")

    return app


def explain(error: RequestValidationError) -> dict[str, str]:
    """What of a request cannot be understood, in the form of every other error: `{"detail", "mend"}`."""
    problems = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"] if part not in ("query", "path", "header", "body"))
        problems.append(f"{where or 'the body'}: {problem['msg']}")
    mend = "send JSON (Content-Type: application/json); docs/control-api.md says which"
    return {"detail": "; ".join(problems), "mend": mend}


async def _events(supervisor: Supervisor, cursor: int) -> AsyncIterator[str]:
    """Events after `cursor` as they come, with a comment now and then so that a dead connection is noticed."""
    quiet = 0.0
    while True:
        rows = supervisor.store.events(after=cursor, limit=500)
        for row in rows:
            cursor = row["id"]
            yield f"id: {cursor}\ndata: {json.dumps(row)}\n\n"
        if rows:
            quiet = 0.0
        elif supervisor.ended:
            return
        else:
            await asyncio.sleep(EVENT_POLL_S)
            quiet += EVENT_POLL_S
            if quiet >= KEEP_ALIVE_S:
                quiet = 0.0
                yield ": still here\n\n"


def prometheus(now: dict[str, Any]) -> str:
    """The status as Prometheus text."""
    lines = []

    def gauge(name: str, text: str, values: dict[str, float]) -> None:
        lines.append(f"# HELP aglite_{name} {text}")
        lines.append(f"# TYPE aglite_{name} gauge")
        lines.extend(f"aglite_{name}{labels} {value:g}" for labels, value in values.items())

    gauge("step", "Training steps done.", {"": now["step"]})
    gauge("policy_version", "Policy version in force.", {"": now["policy_version"]})
    gauge("phase", "1 for the phase the accelerator is in.", {f'{{phase="{now["phase"]}"}}': 1})
    gauge("rollouts", "Rollouts by state.", {f'{{state="{k}"}}': v for k, v in now["queue"].items()})
    gauge("gate_held", "Requests held by the gate.", {"": now["gate"]["held"]})
    gauge(
        "engine_requests",
        "Requests at the engine.",
        {f'{{state="{k}"}}': now["engine"][k] for k in ("running", "waiting")},
    )
    gauge("engine_tokens_per_second", "Sampled tokens a second.", {"": now["engine"]["tokens_per_s"]})
    if now["reward"]:
        gauge("reward_mean", "Mean training reward of the last step.", {"": now["reward"][-1]["mean"]})
    if now["val"]:
        gauge("validation_reward_mean", "Mean reward of the last evaluation.", {"": now["val"][-1]["mean"]})
    gauge("database_bytes", "Size of the run's database.", {"": now["host"]["db_bytes"]})
    return "\n".join(lines) + "\n"
