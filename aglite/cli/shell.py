"""`aglite shell`: a shell beside the agent of a rollout that runs, in its container or pod or scratch directory."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aglite.cli.logs import whole_id
from aglite.cli.terminal import attach
from aglite.cli.where import find_run
from aglite.errors import AgliteError
from aglite.paths import ROLLOUT_ID, RunDir
from aglite.rollouts import reap_child
from aglite.rollouts.reaper import MARK
from aglite.stored import StoredRun
from aglite.units import UNFINISHED

SHELL = ["/bin/sh", "-c", "if command -v bash >/dev/null; then exec bash; else exec sh; fi"]
RESIZE_AGAIN_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"""When a size that Docker refused is told again: a command takes it from its beginning, which may be some time away."""
NOT_THE_AGENTS = (ROLLOUT_ID, MARK)
"""What a process of the agent's is known by: the shell is none, so it is neither counted nor ended as one."""


def shell(directory: Path | None, name: str) -> int:
    """Open the shell on this terminal; its exit code. Raises AgliteError where there is no agent to be beside."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise AgliteError("`aglite shell` needs a terminal", "in scripts, `aglite logs` and `aglite show` tell what is")
    stored = StoredRun(find_run(directory))
    try:
        row = stored.store.rollout(whole_id(stored, name))
        sandbox = stored.store.meta("sandbox") or {}
    finally:
        stored.close()
    if row["state"] != "running":
        raise AgliteError(f"rollout {row['id']} has no agent that runs: it is {row['state']}", _mend(row["state"]))
    print(f"Beside the agent of {row['id']}; what you change counts as its work", file=sys.stderr)
    if row["backend"] == "docker":
        return in_container(stored.run_dir, row["id"])
    if row["backend"] == "local":
        return in_scratch(stored.run_dir, row["id"], row["attempt"])
    if row["backend"] == "kubernetes":
        return in_pod(stored.run_dir, sandbox, row["id"], row["attempt"])
    raise AgliteError(f"the agent of {row['id']} is not on this machine: {row['backend']}", "enter it where it runs")


def _mend(state: str) -> str:
    if state == "grading":
        return "its agent has ended; `aglite logs` has what it printed"
    if state in UNFINISHED:
        return "wait until it runs: `aglite rollouts --state running` lists those that do"
    return "`aglite show` and `aglite logs` tell what it did; `aglite rollouts --state running` lists those that run"


def in_container(run: RunDir, rollout_id: str) -> int:
    """A shell in the agent's container: its user, working directory and environment, and as little privilege."""
    import docker

    from aglite.rollouts.backends.engine import LABEL_ROLE, LABEL_ROLLOUT, LABEL_RUN, connect

    labels = {LABEL_RUN: str(run.path.resolve()), LABEL_ROLE: "agent", LABEL_ROLLOUT: rollout_id}
    with contextlib.closing(connect()) as client:
        found = client.containers(filters={"label": [f"{name}={value}" for name, value in labels.items()]})
        if not found:
            raise _gone(rollout_id)
        environment = {"TERM": os.environ.get("TERM", "xterm")}
        try:
            id = client.exec_create(found[0]["Id"], SHELL, stdin=True, tty=True, environment=environment)["Id"]
            stream = client.exec_start(id, tty=True, socket=True)
        except docker.errors.APIError as error:
            raise AgliteError(f"no shell in this container: {error.explanation}", "its image needs /bin/sh") from None
        with stream:
            stream._sock.setblocking(True)

            def resize(rows: int, columns: int) -> None:
                for wait_s in RESIZE_AGAIN_S:
                    try:
                        client.exec_resize(id, rows, columns)
                        return
                    except docker.errors.APIError:
                        if client.exec_inspect(id)["ExitCode"] is not None:  # it has just ended
                            return
                        time.sleep(wait_s)  # it has not begun yet

            attach(stream.fileno(), resize)
        code = client.exec_inspect(id)["ExitCode"]
        return 1 if code is None else code


def in_pod(run: RunDir, sandbox: Mapping[str, Any], rollout_id: str, attempt: int) -> int:
    """A shell in the agent's container of its pod. `sandbox`: what its supervisor noted of the cluster."""
    from aglite.config import Kubernetes
    from aglite.rollouts.backends.kube.api import ApiError, NoAnswer
    from aglite.rollouts.backends.kube.exec import ExecError
    from aglite.rollouts.backends.kube.manifests import LABEL_ATTEMPT, LABEL_ROLE, LABEL_ROLLOUT, LABEL_RUN
    from aglite.rollouts.backends.kube.objects import run_id
    from aglite.rollouts.backends.kube.terminal import run_on_terminal
    from aglite.rollouts.causes import BackendError

    labels = {LABEL_RUN: run_id(run), LABEL_ROLE: "agent", LABEL_ROLLOUT: rollout_id, LABEL_ATTEMPT: str(attempt)}
    selector = ",".join(f"{name}={value}" for name, value in labels.items())
    settings = Kubernetes(context=sandbox["context"], namespace=sandbox["namespace"])
    command = ["/bin/sh", "-c", f'TERM="$1"; export TERM; {SHELL[-1]}', "sh", os.environ.get("TERM", "xterm")]
    try:
        code = run_on_terminal(settings, selector, command, attach)
    except (ApiError, NoAnswer, BackendError, ExecError) as error:
        raise AgliteError(f"no shell in the pod of {rollout_id}: {error}", "`aglite doctor RECIPE` checks it") from None
    if code is None:
        raise _gone(rollout_id)
    return code


def in_scratch(run: RunDir, rollout_id: str, attempt: int) -> int:
    """A shell of this machine in the agent's working directory, with its environment; it ends with the agent."""
    agent = _agent_process(run, rollout_id)
    ended = None if agent is None else _pidfd(agent)
    if agent is None or ended is None:
        raise _gone(rollout_id)
    environ = dict(entry.split(b"=", 1) for entry in reap_child.environ_of(agent).split(b"\0") if b"=" in entry)
    for name in NOT_THE_AGENTS:
        environ.pop(name.encode(), None)
    environ[b"TERM"] = os.environ.get("TERM", "xterm").encode()
    workdir = run.scratch.resolve() / f"{rollout_id}.{attempt}" / "work"
    child, terminal = pty.fork()
    if child == 0:
        try:
            os.chdir(workdir)
            os.execve(SHELL[0], SHELL, environ)
        except OSError as error:
            os.write(2, f"{SHELL[0]}: {error.strerror}\r\n".encode())
        finally:
            os._exit(126)
    try:
        attach(terminal, lambda rows, columns: termios.tcsetwinsize(terminal, (rows, columns)), ended)
    finally:
        if select.select([ended], [], [], 0)[0]:
            print("The agent has ended.", file=sys.stderr)
        os.close(terminal)  # hangs up on whatever still runs in it
        os.close(ended)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


def _agent_process(run: RunDir, rollout_id: str) -> int | None:
    """The first process of a rollout that still runs: the agent itself, or what is left of it."""
    ours, ending = os.fsencode(f"{ROLLOUT_ID}={rollout_id}"), os.fsencode(f"@{run.path.resolve()}\0")
    found = reap_child.find(lambda environ: reap_child.has(environ, ours) and ending in environ)
    return min(found, key=lambda pid: (reap_child.stat_of(pid, reap_child.STARTED) or 0, pid), default=None)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _gone(rollout_id: str) -> AgliteError:
    return AgliteError(
        f"the agent of {rollout_id} has just ended, or its supervisor died", "`aglite status` says whether one runs"
    )
