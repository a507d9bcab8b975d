"""The routes of the control API."""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException as StarletteHTTPException

from aglite import strict_json
from aglite.control import shapes
from aglite.control.read import add_reading
from aglite.control.steer import add_steering
from aglite.control.stream import event_stream
from aglite.errors import AgliteError, NotFoundError
from aglite.shown import shown
from aglite.status import status

if TYPE_CHECKING:
    from aglite.supervisor import Supervisor

BODY_BYTES = 16 * 1024 * 1024
"""Longest body of a request: the task of an external rollout fits in."""

OPENAPI = "/api/openapi.json"

Cursor = Annotated[int, Query(ge=0, lt=2**63)]  # what SQLite takes for a number
Limit = Annotated[int, Query(ge=1, lt=2**31)]

ABOUT = """\
Everything that aglite's own terminal and command line know of a run and can do with it. `control.json` in the run
directory has `url` and `token` while a supervisor runs. docs/control-api.md explains more."""

REFUSALS = {
    401: "The admin token is missing or wrong.",
    404: "There is no such thing.",
    409: "It cannot be done now.",
    422: "The request cannot be understood.",
}


class Json(JSONResponse):
    """What any client can read, also of a run whose numbers are none any more."""

    def render(self, content: Any) -> bytes:
        return strict_json.dumps(content).encode()


class BodyLimit:
    """Ends requests whose body is longer than BODY_BYTES, before it is all in memory: it is read before the token is
    looked at."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size = 0

        async def counted() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > BODY_BYTES:
                raise HTTPException(413, f"the body is longer than {BODY_BYTES} bytes", {"connection": "close"})
            return message

        await self._app(scope, counted, send)


def create_control_app(supervisor: Supervisor, token: str) -> FastAPI:
    """The control API of one supervisor. All routes but `/healthz` and the OpenAPI document want `token` as Bearer."""
    # no page of documentation: FastAPI's would load its scripts from the internet
    app = FastAPI(
        title="aglite's control API",
        version="1",
        description=ABOUT,
        docs_url=None,
        redoc_url=None,
        openapi_url=OPENAPI,
        default_response_class=Json,
        generate_unique_id_function=_operation,
    )
    app.add_middleware(BodyLimit)
    bearer = HTTPBearer(auto_error=False, scheme_name="admin", description="`token` of the run's control.json")

    def admin(given: HTTPAuthorizationCredentials | None = Depends(bearer)) -> None:
        if given is None or not hmac.compare_digest(given.credentials.encode(), token.encode()):
            raise HTTPException(
                401,
                "the admin token of control.json is wanted as Authorization: Bearer",
                {"WWW-Authenticate": "Bearer"},
            )

    def route(answer: Any, *refusals: int, tag: str = "reading") -> dict[str, Any]:
        """What a route says of itself: its shape is documented, not enforced on what is sent."""
        problems = {code: {"model": shapes.Problem, "description": REFUSALS[code]} for code in (401, 422, *refusals)}
        ok = {200: {"model": answer}} if answer is not None else {}
        return {
            "dependencies": [Depends(admin)],
            "response_model": None,
            "responses": {**ok, **problems},
            "tags": [tag],
        }

    store = supervisor.store

    @app.exception_handler(AgliteError)
    async def refused(_: Request, error: AgliteError) -> Json:
        code = 404 if isinstance(error, NotFoundError) else 409
        return Json({"detail": error.message, "mend": error.mend}, status_code=code)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Json:
        return Json(explain(error), status_code=422)

    @app.exception_handler(StarletteHTTPException)
    async def http_problem(request: Request, error: StarletteHTTPException) -> Json:
        return Json(_problem(request, error), error.status_code, headers=error.headers)

    @app.get("/healthz", tags=["reading"])
    async def healthz() -> shapes.Health:
        """Whether the supervisor answers; needs no token."""
        return shapes.Health(status="ok")

    @app.get("/api/status", **route(shapes.Status))
    async def get_status() -> Any:
        """Where the run stands."""
        return shown(status(supervisor), supervisor.redactor)

    @app.get("/api/rollouts", **route(list[shapes.Rollout]))
    async def list_rollouts(
        state: shapes.State | None = None,
        step: Cursor | None = None,
        limit: Limit = 200,
        after: str | None = None,
    ) -> Any:
        """Rollouts, newest first. `step`: those that it trained; `after`: the last id of the page before."""
        return shown(store.rollouts(state=state, step=step, limit=limit, after=after), supervisor.redactor)

    @app.get("/api/rollouts/{rollout_id}", **route(shapes.RolloutDetail, 404))
    async def get_rollout(rollout_id: str) -> Any:
        """One rollout with its calls and samples."""
        from aglite.show import rollout_detail

        gateway = getattr(supervisor.runtime, "gateway", None)
        tokenizer = getattr(gateway.renderer, "tokenizer", None) if gateway is not None else None  # text has none
        return await asyncio.to_thread(rollout_detail, store, supervisor.run_dir, rollout_id, tokenizer=tokenizer)

    @app.get("/api/steps", **route(list[shapes.Step]))
    async def list_steps() -> Any:
        """Every training step in the order they were made, those that were rolled back among them."""
        return store.steps()

    @app.get("/api/events", **_text(route(None), "text/event-stream", "the events, one a block"))
    async def follow_events(
        after: Cursor = 0, last_event_id: Annotated[int | None, Header(ge=0, lt=2**63)] = None
    ) -> StreamingResponse:
        """Server-sent events: first those past the cursor `after`, then new ones as they happen. Each `id` is its
        cursor, each `data` an Event as JSON; the header `Last-Event-ID`, which clients send when they reconnect, wins
        over `after`. The stream ends with the run."""
        cursor = after if last_event_id is None else last_event_id
        return StreamingResponse(event_stream(supervisor, cursor), media_type="text/event-stream")

    @app.get("/metrics", **_text(route(None), "text/plain", "the metrics"))
    async def metrics() -> PlainTextResponse:
        """The status for Prometheus."""
        from aglite.control.metrics import CONTENT_TYPE, prometheus

        return PlainTextResponse(prometheus(status(supervisor), store), media_type=CONTENT_TYPE)

    @app.post("/api/pause", **route(shapes.Wish, 409, tag="steering"))
    async def pause() -> Any:
        """Hold everything."""
        return supervisor.ask("pause")

    @app.post("/api/resume", **route(shapes.Wish, 409, tag="steering"))
    async def resume() -> Any:
        """Let a paused run go on."""
        return supervisor.ask("resume")

    @app.post("/api/checkpoint", **route(shapes.Wish, 409, tag="steering"))
    async def checkpoint() -> Any:
        """Write a checkpoint before the next step."""
        return supervisor.ask("checkpoint")

    @app.post("/api/evaluate", **route(shapes.Wish, 409, tag="steering"))
    async def evaluate() -> Any:
        """Evaluate the policy in force before the next step."""
        return supervisor.ask("evaluate")

    add_reading(app, supervisor, route)
    add_steering(app, supervisor, route)

    @app.post("/api/stop", **route(shapes.Wish, 409, tag="steering"))
    async def stop(body: shapes.StopRequest | None = None) -> Any:
        """End the run cleanly, as Ctrl-C does."""
        after_step = bool(body and body.after_step and not body.now)
        return supervisor.ask("stop now" if body and body.now else "stop after step" if after_step else "stop")

    @app.post("/api/rollouts/{rollout_id}/kill", **route(shapes.RolloutState, 409, tag="steering"))
    async def kill_rollout(rollout_id: str) -> Any:
        """End one rollout; it has no reward."""
        await supervisor.kill(rollout_id)
        return {"state": "cancelled"}

    @app.post("/api/rollouts/{rollout_id}/retry", **route(shapes.RolloutState, 404, 409, tag="steering"))
    async def retry_rollout(rollout_id: str) -> Any:
        """Launch one that failed or was cancelled again, while its group still waits for others."""
        await supervisor.retry(rollout_id)
        return {"state": "queued"}

    @app.post("/api/rollouts", **route(shapes.OpenedRollout, 409, tag="external rollouts"))
    async def open_rollout(body: shapes.NewRollout) -> Any:
        """Begin a rollout that somebody else launches."""
        return await supervisor.external.open(body.task, body.split, body.group)

    @app.post("/api/rollouts/{rollout_id}/finish", **route(shapes.EndedRollout, 409, tag="external rollouts"))
    async def finish_rollout(rollout_id: str, body: shapes.FinishedRollout) -> Any:
        """End it, with its reward or with the error that kept it from one."""
        return await supervisor.external.finish(rollout_id, body.reward, body.breakdown, body.error)

    return app


def _operation(route: APIRoute) -> str:
    """The name of an operation in the OpenAPI document."""
    return route.name


def _text(settings: dict[str, Any], media_type: str, description: str) -> dict[str, Any]:
    """A route that answers with no JSON."""
    ok = {"content": {media_type: {"schema": {"type": "string"}}}, "description": description}
    return {**settings, "responses": {200: ok, **settings["responses"]}, "response_class": Response}


def explain(error: RequestValidationError) -> dict[str, str]:
    """What of a request cannot be understood, in the form of every other error: `{"detail", "mend"}`."""
    problems = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"] if part not in ("query", "path", "header", "body"))
        problems.append(f"{where or 'the body'}: {problem['msg']}")
    mend = "send JSON (Content-Type: application/json); docs/control-api.md says which"
    return {"detail": "; ".join(problems), "mend": mend}


def _problem(request: Request, error: StarletteHTTPException) -> dict[str, str]:
    """The body of an error; one of routing names the route and says where to look."""
    path = request.url.path
    mend = f"GET {OPENAPI} lists what there is"
    if error.status_code == 404 and error.detail == "Not Found":
        return {"detail": f"there is no route {path}", "mend": mend}
    if error.status_code == 405:
        return {"detail": f"{path} does not take {request.method}", "mend": mend}
    return {"detail": error.detail}
