"""Why a request got no reply, put into words once for every dialect."""

from __future__ import annotations

import re

from aglite.engine.base import EngineBusy, RequestRefused
from aglite.errors import AgliteError, GrammarError
from aglite.gateway.dialects.base import Dialect, Problem, Request, RequestError

_LONGEST = 2000
"""Characters of an error message."""

_CONTEXT = re.compile(r"maximum context length is (\d+) tokens.*?(\d+) (?:input )?tokens", re.DOTALL)
"""How OpenAI, vLLM and others word it when a prompt is too long."""


def request_problem(error: RequestError) -> Problem:
    """A request that cannot be served as it is. What of it an error quotes may be as long as the request: it is cut."""
    return Problem(400, "invalid", _cut(error.message), param=_cut(error.param), code=error.code)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def limit_problem(name: str, message: str) -> Problem:
    return Problem(403, "limit", message, code=f"rollout_limit_{name}")


def held_problem(max_hold_s: float, retry_after_s: int) -> Problem:
    return Problem(
        503,
        "held",
        f"the model is being updated; the request was held for {max_hold_s:g} s",
        code="held_too_long",
        retry_after_s=retry_after_s,
    )


def unconstrained_problem(request: Request, engine: str) -> Problem:
    """The engine, named by its kind, cannot hold a reply to what the request asks for."""
    wish = "force a tool call" if request.must_call else "constrain a reply to a JSON schema"
    field = request.constrained_by
    return Problem(
        400, "invalid", f"{field}: the engine ({engine}) cannot {wish}", param=field, code="unsupported_value"
    )


def engine_problem(dialect: Dialect, request: Request, error: BaseException) -> Problem:
    """The engine failed, or cannot do this very request: then the agent is told in the engine's words."""
    if isinstance(error, GrammarError):
        field = "tools" if request.must_call else request.schema_field
        return Problem(400, "invalid", f"{field}: {error.message}", param=field, code="unsupported_value")
    reason = error.message if isinstance(error, AgliteError) else str(error)
    if isinstance(error, RequestRefused):
        if found := _CONTEXT.search(reason):
            return dialect.context_problem(request, int(found[2]), int(found[1]))
        return Problem(400, "invalid", reason, param=error.param, code=error.code)
    retry_after_s = error.retry_after_s if isinstance(error, EngineBusy) else 5
    return Problem(503, "engine", f"the engine failed: {reason}", code="engine_error", retry_after_s=retry_after_s)
