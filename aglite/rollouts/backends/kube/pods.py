"""What the status of a pod means for the attempt that it runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aglite.config import Limits
from aglite.errors import RecipeError
from aglite.rollouts.backends.contained import exit_code
from aglite.rollouts.causes import BackendError, Cause
from aglite.rollouts.process import Exit

IN, AGENT, OUT = "files-in", "agent", "files-out"
"""The containers of a pod: what brings files in, the agent, and what brings files out."""

KILLED = 128 + 9

NO_IMAGE = ("ImagePullBackOff", "ErrImageNeverPull", "RegistryUnavailable", "ImageInspectError")
"""Reasons for which a container waits that has no image. ErrImagePull is not among them: the kubelet tries again, and
says ImagePullBackOff when that failed too."""
BAD_IMAGE = "InvalidImageName"
NOT_MADE = ("CreateContainerError", "RunContainerError", "PreCreateHookError", "PostStartHookError")
NOT_RUN = ("StartError", "ContainerCannotRun")
NOT_ADMITTED = ("UnexpectedAdmissionError", "NodeAffinity", "NodePorts", "AppArmor", "TopologyAffinityError")
NO_PROGRAM = ("executable file not found", "no such file or directory", "exec format error", "permission denied")

OWN_DISK = ("EmptyDir volume", "ephemeral local storage", "local ephemeral storage")
"""In the message of an eviction: the pod itself used more disk than it was given."""

Stage = Literal["pending", "files", "filled", "running", "ended"]


@dataclass(frozen=True, slots=True)
class Seen:
    """How far a pod is: `pending`, waiting for its `files`, `filled` with them, its agent `running`, or `ended` by
    `exit`."""

    stage: Stage
    exit: Exit | None = None
    waits_for: str = ""
    """Why it is still pending, for people."""


def look(pod: Mapping[str, Any], limits: Limits, past: str = "") -> Seen:
    """How far a pod is. `past`: why its time is up, if so. Raises BackendError or RecipeError where it cannot run, or
    is not to be believed any more."""
    status = pod.get("status") or {}
    gone = _gone(pod, status, past)
    inits = _by_name(status.get("initContainerStatuses") or ())
    mains = _by_name(status.get("containerStatuses") or ())
    agent = (mains.get(AGENT) or {}).get("state") or {}
    if ended := agent.get("terminated"):
        exit = _exit(ended, limits, gone)
        return Seen("ended", exit)
    if gone:
        raise BackendError(gone)
    for container in (*inits.values(), *mains.values()):
        _check_waiting(container)
    files = (inits.get(IN) or {}).get("state") or {}
    filled = files.get("terminated")
    if filled and filled.get("exitCode"):
        raise BackendError(Cause("launch", f"{IN} ended with {_words(filled)}"))
    out = ((mains.get(OUT) or {}).get("state") or {}).get("terminated")
    if out:
        raise BackendError(Cause("lost", f"{OUT} ended with {_words(out)}"))
    if "running" in agent:
        return Seen("running")
    if "running" in files:
        return Seen("files")
    return Seen("filled" if filled else "pending", waits_for=_waits_for(status, [*inits.values(), *mains.values()]))


def _by_name(statuses: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {status["name"]: status for status in statuses}


def _gone(pod: Mapping[str, Any], status: Mapping[str, Any], past: str) -> Cause | None:
    """Why a pod is lost: evicted, deleted by somebody, its node gone."""
    reason, message = status.get("reason") or "", status.get("message") or ""
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    disruption = conditions.get("DisruptionTarget") or {}
    text = ": ".join(filter(None, (reason, message)))[:300]
    if reason == "Evicted" and any(words in message for words in OWN_DISK):
        return Cause("disk", message[:300])
    if reason == "DeadlineExceeded":
        return Cause("lost", past or "it lasted longer than the deadline of its pod")
    if reason in NOT_ADMITTED or reason.startswith("OutOf"):
        return Cause("backend", f"its node does not take it: {text}")
    if status.get("phase") == "Failed" and reason:
        return Cause("lost", text)  # Evicted, NodeLost, NodeShutdown, Terminated, Preempting
    if disruption.get("status") == "True":
        words = ": ".join(filter(None, (disruption.get("reason"), disruption.get("message"))))
        return Cause("lost", f"its pod has to go: {words}"[:300])
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return Cause("lost", past or "somebody deleted its pod")
    if status.get("phase") == "Unknown":
        return Cause("lost", text or "its node does not report any more")
    return None


def _exit(ended: Mapping[str, Any], limits: Limits, gone: Cause | None) -> Exit:
    reason, status, message = ended.get("reason") or "", int(ended.get("exitCode") or 0), ended.get("message") or ""
    if reason in NOT_RUN:
        raise _cannot_start(message or reason)
    code = exit_code(status)
    if reason == "ContainerStatusUnknown":
        return Exit(-9, 0.0, Cause("lost", message[:300] or "its node lost its container"))
    if gone and gone.code == "disk":
        return Exit(code, 0.0, gone)
    if reason == "OOMKilled" and status:
        return Exit(code, 0.0, Cause("memory", f"limit {limits.memory_mb} MB"))
    if gone and status in (KILLED, 128 + 15):
        return Exit(code, 0.0, gone)  # the kubelet ended it because its pod had to go
    return Exit(code, 0.0)


def _check_waiting(container: Mapping[str, Any]) -> None:
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason, message = waiting.get("reason") or "", (waiting.get("message") or "")[:300]
    image = container.get("image") or ""
    if reason == BAD_IMAGE:
        raise RecipeError(f"agent.image: {message or image}", "correct the name")
    if reason in NO_IMAGE:
        raise BackendError(Cause("image", f"{image}: {message or reason}"))
    if reason in NOT_MADE:
        if any(words in message for words in NO_PROGRAM):
            raise _cannot_start(message)
        raise BackendError(Cause("launch", f"{reason}: {message}"))


def _cannot_start(message: str) -> RecipeError:
    return RecipeError(
        f"agent.image: a container cannot be started: {message[:300]}",
        "the agent's image needs sh, and agent.kubernetes.files_image sh, tar, find, stat and awk",
    )


def _words(ended: Mapping[str, Any]) -> str:
    parts = [f"code {ended.get('exitCode')}", ended.get("reason"), ended.get("message")]
    return ": ".join(str(part) for part in parts if part)[:300]


def _waits_for(status: Mapping[str, Any], containers: Sequence[Mapping[str, Any]]) -> str:
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition.get("status") == "False":
            return f"no node takes it: {condition.get('message') or condition.get('reason') or ''}"[:300]
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return f"{container['name']}: {waiting['reason']}: {waiting.get('message') or ''}"[:300]
    return "its containers are being created" if status.get("startTime") else "it waits for a node"
