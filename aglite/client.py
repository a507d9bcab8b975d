"""The control API as Python calls. Standard library only, so that `aglite status` starts quickly.

`control.json` is read anew for every request: a supervisor that was restarted on another port is found by the next one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, Literal
from urllib.parse import quote, urlencode, urlsplit

from aglite.errors import AgliteError
from aglite.paths import RunDir

Reason = Literal["absent", "dead", "silent", "refused"]


class ControlError(AgliteError):
    """The supervisor cannot be asked. `reason`: `absent` none runs, `dead` it ended without cleaning up, `silent` it is
    there but does not answer, `refused` it answered with an error."""

    def __init__(self, reason: Reason, message: str, mend: str) -> None:
        super().__init__(message, mend)
        self.reason = reason


class ControlClient:
    """Asks the supervisor of one run directory. Every method raises ControlError."""

    def __init__(self, run_dir: RunDir, *, timeout: float = 10.0) -> None:
        self.run_dir = run_dir
        self.timeout = timeout

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor if control.json names a living one."""
        control = read_control(self.run_dir)
        return control["pid"] if control and alive(control["pid"]) else None

    def status(self) -> dict[str, Any]:
        return self._get("/api/status")

    def rollouts(
        self, *, state: str | None = None, step: int | None = None, limit: int | None = None, after: str | None = None
    ) -> list[dict[str, Any]]:
        """Rollouts in the design's JSON form, newest first."""
        query = {"state": state, "step": step, "limit": limit, "after": after}
        return self._get("/api/rollouts", {key: value for key, value in query.items() if value is not None})

    def rollout(self, rollout_id: str) -> dict[str, Any]:
        """One rollout with its `calls` and `samples` as lists."""
        return self._get(f"/api/rollouts/{quote(rollout_id, safe='')}")

    def tokens(self, rollout_id: str) -> list[dict[str, Any]]:
        """The samples of a rollout, token by token."""
        return self._get(f"/api/rollouts/{quote(rollout_id, safe='')}/tokens")

    def recipe(self) -> list[dict[str, Any]]:
        """The resolved recipe, key by key."""
        return self._get("/api/recipe")

    def sandboxes(self) -> list[dict[str, Any]]:
        return self._get("/api/sandboxes")

    def steps(self) -> list[dict[str, Any]]:
        return self._get("/api/steps")

    def post(self, action: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """`pause`, `resume`, `preempt`, `stop`, `checkpoint`, `evaluate`, `concurrency`, and of one rollout or task
        `rollouts/ID/kill`, `/retry`, `/quarantine`, `tasks/ID/quarantine`, `/release`."""
        return self._json("POST", f"/api/{action}", body or {})

    def events(self, after: int = 0) -> Iterator[dict[str, Any]]:
        """Events newer than the cursor `after`, then new ones as they happen; ends when the supervisor is gone.

        A broken connection is taken up again after the last event that arrived.
        """
        while True:
            try:
                for event in self._stream(after):
                    after = event["id"]
                    yield event
            except ControlError as error:
                if error.reason != "silent":
                    if error.reason == "refused":
                        raise
                    return
            except (OSError, HTTPException, ValueError):
                pass  # cut off in the middle of an event; it is sent again
            time.sleep(0.5)

    def _stream(self, after: int) -> Iterator[dict[str, Any]]:
        connection, response = self._open("GET", f"/api/events?after={after}", None, timeout=60.0)
        try:
            data: list[str] = []
            for raw in response:
                line = raw.decode().rstrip("\r\n")
                if line.startswith("data:"):
                    data.append(line[5:].lstrip())
                elif not line and data:
                    yield json.loads("\n".join(data))
                    data = []
        finally:
            connection.close()

    def _get(self, path: str, query: dict[str, Any] | None = None) -> Any:
        return self._json("GET", f"{path}?{urlencode(query)}" if query else path, None)

    def _json(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        connection, response = self._open(method, path, body, timeout=self.timeout)
        try:
            return json.loads(response.read() or b"{}")
        except (OSError, HTTPException, ValueError) as error:
            raise self._silent(error) from error
        finally:
            connection.close()

    def _open(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> tuple[HTTPConnection, HTTPResponse]:
        control = self._control()
        address = urlsplit(control["url"])
        connection = HTTPConnection(address.hostname or "127.0.0.1", address.port, timeout=timeout)
        headers = {"Authorization": f"Bearer {control['token']}"}
        payload = None
        if body is not None:
            payload = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, path, body=payload, headers=headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            connection.close()
            raise self._silent(error) from error
        if response.status >= 400:
            try:
                raise self._refused(response.status, response.read())
            finally:
                connection.close()
        return connection, response

    def _control(self) -> dict[str, Any]:
        control = read_control(self.run_dir)
        if control is None:
            raise ControlError(
                "absent",
                f"no supervisor runs in {self.run_dir.path}",
                "start or continue it with `aglite up`; what is recorded can be read with `aglite rollouts` and `show`",
            )
        if not alive(control["pid"]):
            raise ControlError(
                "dead",
                f"the supervisor of {self.run_dir.path} (process {control['pid']}) died without cleaning up",
                f"its last words are in {self.run_dir.logs / 'supervisor.log'}; `aglite up` goes on from the last "
                "checkpoint",
            )
        return control

    def _silent(self, error: BaseException) -> ControlError:
        try:
            control = self._control()
        except ControlError as gone:  # it went away while it was asked
            return gone
        return ControlError(
            "silent",
            f"the supervisor (process {control['pid']}) does not answer at {control['url']}: {error or 'no answer'}",
            "wait a moment and try again; `aglite down --now` ends it",
        )

    def _refused(self, status: int, body: bytes) -> ControlError:
        if status in (401, 403):
            return ControlError(
                "refused",
                f"the supervisor of {self.run_dir.path} does not accept the token in control.json",
                "another run may have taken its port; check --dir",
            )
        return ControlError("refused", *_explanation(status, body))


def read_control(run_dir: RunDir) -> dict[str, Any] | None:
    """`{"url", "token", "pid"}`, or None when there is none (a half-written one counts as none)."""
    try:
        control = json.loads(run_dir.control.read_bytes())
        return {"url": control["url"], "token": control["token"], "pid": int(control["pid"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not _zombie(pid)


def _zombie(pid: int) -> bool:
    """A dead child that its parent has not collected yet (that is us, when `aglite up` started it)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[:1] == [b"Z"]
    except OSError:
        return False


def _explanation(status: int, body: bytes) -> tuple[str, str]:
    """Message and mend out of an error's body, `{"detail": text, "mend": text}`."""
    try:
        data = json.loads(body)
    except ValueError:
        data = {}
    detail, mend = data.get("detail"), data.get("mend", "")
    if detail is not None and not isinstance(detail, str):
        detail = json.dumps(detail)
    if status == 404 and not mend:
        mend = "`aglite rollouts` lists the rollouts of the run"
    return detail or f"the supervisor answered with HTTP status {status}", mend
