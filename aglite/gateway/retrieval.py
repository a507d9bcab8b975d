"""What the Responses API offers for a response that was given: looking at it again."""

from __future__ import annotations

from aglite.errors import StoreError
from aglite.gateway.dialects.base import Problem, RequestError
from aglite.gateway.dialects.responses import ResponsesDialect
from aglite.gateway.recall import recorded
from aglite.gateway.sessions import Session
from aglite.store import Store


def retrieve(store: Store, session: Session, method: str, path: str, query: bytes) -> bytes | Problem:
    """Answer `METHOD /v1/responses/PATH`."""
    reply_id, _, rest = path.partition("/")
    if rest == "cancel" and method == "POST":
        return Problem(400, "invalid", "only background responses can be cancelled, and there are none here")
    if rest:
        return Problem(404, "not_found", f"there is no route /responses/{path}", code="not_found")
    if method != "GET":
        message = f"a response does not take {method}: it is part of the run's record"
        return Problem(405, "method", message, code="method_not_allowed")
    if b"stream=true" in query:
        return Problem(400, "invalid", "a response that is over cannot be streamed again", param="stream")
    try:
        return ResponsesDialect().recorded(reply_id, *recorded(store, session, reply_id))
    except RequestError as error:
        return Problem(404, "not_found", error.message, param=error.param, code=error.code)
    except StoreError as error:
        return Problem(500, "store", f"the response could not be read: {error.message}", code="store_error")
