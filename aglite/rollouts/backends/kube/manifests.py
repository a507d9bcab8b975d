"""The objects of a run, as they are sent to the cluster: templates filled in, and what aglite insists on. Pure but for
reading the templates."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import jinja2
import yaml

from aglite.config import Agent, Recipe
from aglite.errors import RecipeError
from aglite.rollouts.backends import Launch, base_environment
from aglite.rollouts.backends.contained import FOLDER
from aglite.rollouts.backends.kube.exec import READY
from aglite.rollouts.backends.kube.pods import AGENT, IN, OUT
from aglite.rollouts.backends.pack import pack

MANAGED_BY = ("app.kubernetes.io/managed-by", "aglite")
LABEL_RUN, LABEL_SUPERVISOR, LABEL_ROLE = "aglite.run", "aglite.supervisor", "aglite.role"
LABEL_ROLLOUT, LABEL_ATTEMPT = "aglite.rollout", "aglite.attempt"

# The agent must not be a container's first process, which no signal from within can end. In the foreground, so that it
# is not started with SIGINT ignored; and what the shell itself says of its end is not the agent's output.
# It goes to the launch's folder itself: templates name the working directory.
RUN = (
    f'cd {FOLDER}/"$1" && shift || exit 126; '
    f'exec 3>&2 2>/dev/null; (exec 2>&3 3>&-; exec "$@" < {FOLDER}/stdin); exit $?'
)
WAIT_FOR_FILES = f"until [ -e {FOLDER}/{READY} ]; do sleep 0.1; done; rm {FOLDER}/{READY}"
STAY = "trap 'exit 0' TERM; sleep {seconds} & wait"

LONGEST_NAME = 52
"""Of a Job: its pods get a suffix, and their names fit a label."""

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The other one takes six times as long, for each launch."""
SECRET_BYTES = 1 << 20
"""What Kubernetes lets a Secret hold."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where pods reach the gateway."""

    name: str
    """The name that its address has, '' where it is a number."""
    addresses: tuple[str, ...]
    port: int

    @property
    def is_loopback(self) -> bool:
        return any(ipaddress.ip_address(address).is_loopback for address in self.addresses)


def gateway_of(url: str) -> Gateway:
    """Look up where a URL leads, as this machine sees it. Blocks. Raises RecipeError."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        return Gateway("", (str(ipaddress.ip_address(host)),), port)
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RecipeError(
            f"gateway.public_url: {host} cannot be looked up from here: {error}",
            "write the address itself; pods are given what the name means here",
        ) from None
    return Gateway(host, tuple(dict.fromkeys(str(entry[4][0]) for entry in found)), port)


@dataclass(frozen=True, slots=True)
class Run:
    """What all objects of a run have in common."""

    id: str
    supervisor: str
    namespace: str
    gateway: Gateway

    @property
    def selector(self) -> dict[str, str]:
        return {LABEL_RUN: self.id}

    @property
    def policy(self) -> str:
        """Name of the NetworkPolicy."""
        return f"aglite-{self.id}"

    def labels(self, role: str, **more: str) -> dict[str, str]:
        own = {MANAGED_BY[0]: MANAGED_BY[1], LABEL_RUN: self.id, LABEL_SUPERVISOR: self.supervisor, LABEL_ROLE: role}
        return {**own, **more}

    def name(self, rollout_id: str, attempt: int) -> str:
        """Of the Job and the Secret of an attempt."""
        wanted = re.sub(r"[^a-z0-9]+", "-", f"aglite-{self.id}-{rollout_id}-{attempt}".lower())
        if len(wanted) <= LONGEST_NAME:
            return wanted
        return f"{wanted[: LONGEST_NAME - 9].rstrip('-')}-{hashlib.sha256(wanted.encode()).hexdigest()[:8]}"


class Templates:
    """The templates of a recipe, or aglite's own."""

    def __init__(self, recipe: Recipe) -> None:
        """Raises RecipeError for a file that is missing or no template."""
        self._agent: Agent = recipe.agent
        settings = recipe.agent.kubernetes
        self._job = _template(recipe.folder, settings.job, "job")
        self._policy = _template(recipe.folder, settings.network_policy, "network_policy")
        self._ca = ""
        if settings.ca:
            self._ca = _read(recipe.folder / Path(settings.ca).expanduser(), "agent.kubernetes.ca")

    @property
    def ca(self) -> str:
        """The certificate authority that agents trust, in PEM; '' for those of their images."""
        return self._ca

    def job(self, launch: Launch, run: Run) -> dict[str, Any]:
        """The Job of an attempt. Raises RecipeError."""
        agent, settings, name = self._agent, self._agent.kubernetes, run.name(launch.rollout_id, launch.attempt)
        uid, gid = map(int, agent.user.split(":"))
        labels = run.labels("agent", **{LABEL_ROLLOUT: launch.rollout_id, LABEL_ATTEMPT: str(launch.attempt)})
        env = base_environment(f"{FOLDER}/home", "/tmp", f"{FOLDER}/task.json")
        if self._ca:
            names = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "CURL_CA_BUNDLE")
            env |= dict.fromkeys(names, f"{FOLDER}/ca.pem")
        variables = {
            "name": name,
            "namespace": run.namespace,
            "labels": labels,
            "image": agent.image,
            "files_image": settings.files_image or agent.image,
            "command": ["sh", "-c", RUN, "sh", launch.cwd, *launch.command],
            "files_in": ["sh", "-c", WAIT_FOR_FILES],
            "files_out": ["sh", "-c", STAY.format(seconds=settings.deadline_s)],
            "folder": FOLDER,
            "env": {name: value for name, value in env.items() if name not in launch.env},
            "secret": name,
            "secret_env": list(launch.env),
            "uid": uid,
            "gid": gid,
            "limits": launch.limits.model_dump(),
            "requests": {"memory": f"{launch.limits.memory_mb}Mi", **settings.requests},
            "deadline_s": settings.deadline_s,
            "network": agent.network,
            "gateway": run.gateway,
        }
        job = _render(self._job, "agent.kubernetes.job", "Job", variables)
        _own(job, name, run.namespace, labels)
        spec = job["spec"] = {"backoffLimit": 0, **(job.get("spec") or {})}
        template = spec.get("template") or {}
        pod = template.get("spec") or {}
        _check(pod, spec)
        _own(template, None, None, labels)
        return job

    def policy(self, run: Run) -> dict[str, Any]:
        """The NetworkPolicy of a run. Raises RecipeError."""
        variables = {
            "name": run.policy,
            "namespace": run.namespace,
            "selector": run.selector,
            "gateway": run.gateway,
        }
        policy = _render(self._policy, "agent.kubernetes.network_policy", "NetworkPolicy", variables)
        _own(policy, run.policy, run.namespace, run.labels("policy"))
        return policy


def secret_of(launch: Launch, run: Run) -> dict[str, Any]:
    """The Secret of an attempt: its environment, with the token. Raises RecipeError for what no Secret can hold."""
    for name in launch.env:
        if not VARIABLE.fullmatch(name):
            raise RecipeError(f"agent.env: Kubernetes takes no variable {name!r}", "use letters, digits and _")
    data = {name: base64.b64encode(value.encode()).decode() for name, value in launch.env.items()}
    size = sum(len(value.encode()) for value in launch.env.values())
    if size > SECRET_BYTES:
        raise RecipeError(
            f"agent.env: {size:,} bytes are more than a Secret holds ({SECRET_BYTES:,})",
            "read AGLITE_TASK_FILE in the agent instead",
        )
    secret: dict[str, Any] = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "immutable": True, "data": data}
    labels = run.labels("secret", **{LABEL_ROLLOUT: launch.rollout_id, LABEL_ATTEMPT: str(launch.attempt)})
    _own(secret, run.name(launch.rollout_id, launch.attempt), run.namespace, labels)
    return secret


def packed(launch: Launch, ca: str) -> tuple[IO[bytes], int]:
    """The files of a launch as a gzipped tar, and its size in bytes. Blocks."""
    return pack(launch, {"stdin": launch.stdin, **({"ca.pem": ca} if ca else {})}, gzipped=True)


def _template(folder: Path, given: str | None, what: str) -> jinja2.Template:
    if given is None:
        source = resources.files(__package__).joinpath(f"{what}.yaml").read_text()
    else:
        source = _read(folder / Path(given).expanduser(), f"agent.kubernetes.{what}")
    try:
        return jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise RecipeError(f"agent.kubernetes.{what}: line {error.lineno}: {error.message}", "correct it") from None


def _read(file: Path, setting: str) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{setting}: {file} cannot be read: {error}", "correct the path") from None


def _render(template: jinja2.Template, setting: str, kind: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    try:
        made = yaml.load(template.render(**variables), LOADER)
    except (jinja2.TemplateError, yaml.YAMLError) as error:
        raise RecipeError(f"{setting}: {error}", "see aglite's own template, and the variables that it uses") from None
    if not isinstance(made, dict) or made.get("kind") != kind:
        raise RecipeError(f"{setting}: it makes no {kind}", f"give one object of `kind: {kind}`")
    return made


def _own(made: dict[str, Any], name: str | None, namespace: str | None, labels: Mapping[str, str]) -> None:
    """Set what an object is found by, whatever its template says."""
    metadata = made["metadata"] = dict(made.get("metadata") or {})
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels}
    if name is not None:
        metadata |= {"name": name, "namespace": namespace}


def _check(pod: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
    """Refuse a Job that could not be run as an attempt. What else is wrong with it the cluster says."""
    names = [one.get("name") for kind in ("initContainers", "containers") for one in pod.get(kind) or ()]
    missing = [name for name in (IN, AGENT, OUT) if name not in names]
    if missing:
        raise RecipeError(
            f"agent.kubernetes.job: it has no container {', '.join(missing)}",
            f"{IN} is the init container that waits for files, {AGENT} runs the agent, {OUT} keeps what it leaves",
        )
    if not isinstance(spec.get("activeDeadlineSeconds", 1), int):
        raise RecipeError("agent.kubernetes.job: its activeDeadlineSeconds is no whole number", "write seconds")
    if pod.get("hostPID") or pod.get("shareProcessNamespace"):
        raise RecipeError(
            "agent.kubernetes.job: the agent would see processes that are not its own",
            "leave out hostPID and shareProcessNamespace: all processes of the agent's container are ended at its end",
        )
    if spec.get("backoffLimit") != 0 or pod.get("restartPolicy") != "Never":
        raise RecipeError(
            "agent.kubernetes.job: it may start an attempt again",
            "write `backoffLimit: 0` and `restartPolicy: Never`; agent.attempts says how often aglite tries",
        )
