"""A Kubernetes cluster for tests: kmock's API server over HTTP, with what it lacks of the real one's manners, the
controllers that Jobs need, and the kubelet of kubelet.py, which runs pods as processes of this machine.

What it adds to kmock: versions and their expiry (410), label and field selectors, strict field validation, foreground
deletion and owners, `log` and `exec`, reviews of permissions. Switches on `Cluster` make it misbehave.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
import time
import types
import typing
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp.web
import kmock
import yaml
from kubelet import Kubelet
from pydantic import BaseModel, ValidationError

FOREGROUND = "foregroundDeletion"
KINDS = {"jobs": "batch/v1/jobs", "pods": "v1/pods", "secrets": "v1/secrets", "events": "v1/events"}
NAMESPACE = "rollouts"
REMEMBERED = 48
"""More requests than come while one of them is looked at."""


class Refusal(kmock.KubernetesError):
    """An answer with one of Kubernetes's own reasons."""


class Server(kmock.KubernetesEmulator):
    """kmock's emulator with a journal of changes, so that lists have versions and watches go on from them."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.version = 100
        self.journal: list[tuple[int, str, str, dict[str, Any]]] = []
        self.oldest = 0
        """Watches from before this version are answered with 410."""
        self.news = asyncio.Event()
        self.cluster: Cluster
        for name in (*KINDS.values(), "networking.k8s.io/v1/networkpolicies"):
            self.resources[name] = {}

    # changes

    def put(self, plural: str, thing: dict[str, Any]) -> None:
        """Change an object as a controller does."""
        key = self._key(plural, thing["metadata"]["name"])
        if key not in self.objects or self.objects[key].deleted:
            return
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        self.objects[key] = copy.deepcopy(thing)
        self._record(plural, "MODIFIED", thing)

    def add(self, plural: str, thing: dict[str, Any]) -> dict[str, Any]:
        self._stamp(thing)
        self.objects[self._key(plural, thing["metadata"]["name"])] = copy.deepcopy(thing)
        self._record(plural, "ADDED", thing)
        return thing

    def drop(self, plural: str, name: str) -> None:
        """Delete an object for good."""
        there = self.find(plural, name)
        if there is not None:
            self.objects[self._key(plural, name)].delete()
            self.version += 1
            there["metadata"]["resourceVersion"] = str(self.version)
            self._record(plural, "DELETED", there)

    def find(self, plural: str, name: str) -> dict[str, Any] | None:
        key = self._key(plural, name)
        if key not in self.objects or self.objects[key].deleted:
            return None
        return copy.deepcopy(self.objects[key].raw)

    def all(self, plural: str) -> list[dict[str, Any]]:
        return [
            copy.deepcopy(thing.raw)
            for (resource, _, _), thing in list(self.objects.items())
            if resource.plural == plural and not thing.deleted
        ]

    def owned(self, plural: str, uid: str) -> list[str]:
        """Names of those that belong to another object."""
        return [
            name
            for (resource, _, name), thing in list(self.objects.items())
            if resource.plural == plural
            and not thing.deleted
            and any(owner["uid"] == uid for owner in thing.raw["metadata"].get("ownerReferences") or ())
        ]

    def _key(self, plural: str, name: str) -> tuple[Any, str, str]:
        return (kmock.resource(KINDS.get(plural, f"networking.k8s.io/v1/{plural}")), NAMESPACE, name)

    def _stamp(self, thing: dict[str, Any]) -> None:
        self.version += 1
        thing.setdefault("metadata", {}).update(
            uid=secrets.token_hex(8),
            resourceVersion=str(self.version),
            creationTimestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            namespace=NAMESPACE,
        )

    def _record(self, plural: str, kind: str, thing: dict[str, Any]) -> None:
        self.journal.append((self.version, plural, kind, copy.deepcopy(thing)))
        news, self.news = self.news, asyncio.Event()
        news.set()

    # requests

    async def _handle(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        cluster = self.cluster
        # kmock looks through all that it has ever been asked, again and again for each request
        del self._requests[:-REMEMBERED]
        plural = request.resource.plural if request.resource else None
        cluster.seen.append((request.method.value, plural or request.url.path, request.subresource or ""))
        for rule in list(cluster.rules):
            if (refusal := rule(request)) is not None:
                raise refusal
        if request.url.path.startswith("/api/v1/namespaces/") and plural is None:
            if request.namespace != NAMESPACE:
                raise Refusal(status=404, reason="NotFound", message=f'namespaces "{request.namespace}" not found')
            return aiohttp.web.json_response({"kind": "Namespace", "metadata": {"name": NAMESPACE}})
        if plural == "selfsubjectaccessreviews":
            asked = request.data["spec"]["resourceAttributes"]
            what = f"{asked['verb']} {asked['resource']}" + (f"/{asked['subresource']}" if asked["subresource"] else "")
            return aiohttp.web.json_response({"status": {"allowed": what not in cluster.forbidden}})
        if request.subresource in ("log", "exec") and request.name:
            return await cluster.kubelet.serve(request.subresource, request.name, request._raw_request)
        if plural is None or request.action is None:
            return await super()._handle(request)
        if request.action == kmock.action.CREATE:
            if request.namespace != NAMESPACE:
                raise Refusal(status=404, reason="NotFound", message=f'namespaces "{request.namespace}" not found')
            self._check(request)
            request.data["metadata"].pop("creationTimestamp", None)
            self._stamp(request.data)
        elif request.action == kmock.action.UPDATE:
            self.version += 1
            request.data.setdefault("metadata", {})["resourceVersion"] = str(self.version)
        elif request.action == kmock.action.DELETE:
            there = self.find(plural, request.name)
            if there is not None and plural in ("jobs", "pods"):
                cluster.delete(plural, there, (request.data or {}).get("gracePeriodSeconds"))
                return aiohttp.web.json_response(there)
            if there is not None:
                self.drop(plural, request.name)
                return aiohttp.web.json_response({"kind": "Status", "status": "Success"})
        answer = await super()._handle(request)
        if request.action == kmock.action.CREATE:
            self._record(plural, "ADDED", request.data)
            cluster.created(plural, copy.deepcopy(request.data))
            if cluster.lose_answers and plural == "jobs":
                cluster.lose_answers -= 1
                request._raw_request.transport.close()
        elif request.action == kmock.action.UPDATE:
            self._record(plural, "MODIFIED", self.find(plural, request.name))
        return answer

    def _check(self, request: kmock.Request) -> None:
        if request.params.get("fieldValidation") == "Strict" and (wrong := wrong_fields(request.data)):
            raise Refusal(status=400, reason="BadRequest", message=f"strict decoding error: {wrong[0]}")

    async def _render_error(self, error: Exception) -> aiohttp.web.StreamResponse:
        reasons = {404: "NotFound", 409: "AlreadyExists"}
        if isinstance(error, kmock.KubernetesError) and not isinstance(error, Refusal):
            error = Refusal(status=error.status, reason=reasons.get(error.status, error.reason), message=error.message)
        return await super()._render_error(error)

    async def _serve_list(self, request: kmock.Request) -> Any:
        items = [thing for thing in self.all(request.resource.plural) if self._chosen(request, thing)]
        return {"kind": "List", "metadata": {"resourceVersion": str(self.version)}, "items": items}

    async def _serve_watch(self, request: kmock.Request) -> AsyncIterator[Any]:
        yield b""
        plural, since = request.resource.plural, int(request.params["resourceVersion"])
        self.cluster.watches += 1
        end = time.monotonic() + float(request.params.get("timeoutSeconds", 60))
        at = next((at for at, entry in enumerate(self.journal) if entry[0] > since), len(self.journal))
        while True:
            news = self.news
            if since < self.oldest:
                yield {
                    "type": "ERROR",
                    "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "old"},
                }
                return
            for version, kind_of, kind, thing in self.journal[at:]:
                if kind_of == plural and self._chosen(request, thing):
                    yield {"type": kind, "object": thing}
                since = version
            at = len(self.journal)
            if request.params.get("allowWatchBookmarks") == "true":
                yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}}
            left = end - time.monotonic()
            if left <= 0:
                return
            waiting = [asyncio.ensure_future(news.wait()), asyncio.ensure_future(self.cluster.end_watches.wait())]
            await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for one in waiting:
                one.cancel()
            if self.cluster.end_watches.is_set():
                return

    def _chosen(self, request: kmock.Request, thing: dict[str, Any]) -> bool:
        labels = thing["metadata"].get("labels") or {}
        involved = thing.get("involvedObject") or {}
        chosen = dict(pair.split("=") for pair in request.params.get("labelSelector", "").split(",") if pair)
        fields = dict(pair.split("=") for pair in request.params.get("fieldSelector", "").split(",") if pair)
        return all(labels.get(name) == value for name, value in chosen.items()) and all(
            involved.get(name.removeprefix("involvedObject.")) == value for name, value in fields.items()
        )


class Cluster:
    """The server, its controllers and one node. `async with` it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = Server()
        self.server.cluster = self
        self.kubelet = Kubelet(self)
        self.port = 0
        self.seen: list[tuple[str, str, str]] = []
        """(method, plural or path, subresource) of all requests."""
        self.rules: list[Callable[[kmock.Request], Exception | None]] = []
        """Each may refuse a request."""
        self.forbidden: set[str] = set()
        """`verb resource` that the client may not do."""
        self.pod_refusal = ""
        """Why no pod can be made now; '': it can."""
        self.no_node = ""
        """Why no node takes a pod now; '': one does."""
        self.lose_answers = 0
        """How many creations of Jobs are done but not answered."""
        self.watches = 0
        self.end_watches = asyncio.Event()
        self._runner: aiohttp.web.ServerRunner | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Cluster:
        await self.server.__aenter__()
        await self.start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "me", "user": {"token": "t0ken"}}],
            "contexts": [
                {"name": "here", "context": {"cluster": "here", "user": "me", "namespace": NAMESPACE}},
                {"name": "elsewhere", "context": {"cluster": "here", "user": "me", "namespace": "no-such"}},
            ],
        }
        self.kubeconfig = self.folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(config))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self.kubelet.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.server.__aexit__(None, None, None)

    async def start(self) -> None:
        """Begin to answer, on the same port as before. What is in the cluster is what was there."""
        self._runner = aiohttp.web.ServerRunner(aiohttp.web.Server(self.server), shutdown_timeout=0.05)
        await self._runner.setup()
        site = aiohttp.web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Break all connections off and answer no more. Pods run on."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            for connection in list(runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
            await runner.cleanup()

    def expire(self) -> None:
        """Forget all history, and end the watches that stand on it."""
        self.server.oldest = self.server.version + 1
        self.server.version += 1
        self.server.news.set()
        self.server.news = asyncio.Event()

    def do(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # what is there

    def jobs(self) -> list[dict[str, Any]]:
        return self.server.all("jobs")

    def pods(self, role: str = "agent") -> list[dict[str, Any]]:
        return [pod for pod in self.server.all("pods") if pod["metadata"]["labels"]["aglite.role"] == role]

    def left(self) -> list[str]:
        """Names of all there is."""
        plurals = ("jobs", "pods", "secrets", "networkpolicies")
        return [f"{plural}/{one['metadata']['name']}" for plural in plurals for one in self.server.all(plural)]

    # what agents wait for

    @property
    def gate(self) -> Path:
        """A file that agents of the tests can wait for."""
        return self.kubelet.shared / "gate"

    def let_go(self) -> None:
        self.gate.touch()

    def agent_has_ended(self, name: str) -> bool:
        """Whether that of a pod has, whoever knows of it."""
        pod = self.kubelet.pods.get(name)
        return pod is None or "terminated" in pod.mains[0].state

    # what becomes of nodes

    async def evict(self, name: str, message: str) -> None:
        """End a pod as its node does that wants its room, or has found it to use too much."""
        pod = self.kubelet.pods[name]
        pod.lost = True  # what is said of it from now on is said here
        there = self.server.find("pods", name)
        status = {**there["status"], "phase": "Failed", "reason": "Evicted", "message": message}
        status["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}]
        self.server.put("pods", {**there, "status": status})
        await self.kubelet.kill(name, 0)

    def preempt(self, name: str) -> None:
        """End a pod as the scheduler does for one of a higher priority."""
        self._disrupt(name, "PreemptionByScheduler", "preempting to accommodate a higher priority pod")

    def lose_node(self, name: str) -> None:
        """A pod's node does not report any more: the pod is to be deleted, and nobody is there to end it."""
        self.kubelet.cut_off.add(name)
        self.kubelet.pods[name].lost = True
        self._disrupt(name, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")

    def _disrupt(self, name: str, reason: str, message: str) -> None:
        there = self.server.find("pods", name)
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
        conditions = [*there["status"].get("conditions", ()), condition]
        self.server.put("pods", {**there, "status": {**there["status"], "conditions": conditions}})
        self.delete("pods", there, None)

    # controllers

    def created(self, plural: str, thing: dict[str, Any]) -> None:
        if plural == "jobs":
            self.do(self._run_job(thing))

    async def _run_job(self, job: dict[str, Any]) -> None:
        name, spec = job["metadata"]["name"], job["spec"]
        began = time.monotonic()
        wait_s = 0.05
        while why := self.pod_refusal:
            message = f'Error creating: pods "{name}-" is forbidden: {why}'
            event = {
                "metadata": {"name": f"{name}.{secrets.token_hex(4)}"},
                "reason": "FailedCreate",
                "message": message,
            }
            self.server.add("events", {**event, "involvedObject": {"kind": "Job", "name": name}})
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, 1)
            if self.server.find("jobs", name) is None:
                return
        there = self.server.find("jobs", name)
        if there is None or there["metadata"].get("deletionTimestamp"):
            return
        template = copy.deepcopy(spec["template"])
        labels = {**template["metadata"].get("labels", {}), "job-name": name}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
        metadata = {"name": f"{name}-{secrets.token_hex(3)}", "labels": labels, "ownerReferences": [owner]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"], "status": {}}
        pod = self.server.add("pods", pod)
        if self.no_node:
            reason = {"reason": "Unschedulable", "message": self.no_node}
            unscheduled = {"type": "PodScheduled", "status": "False", **reason}
            self.server.put("pods", {**pod, "status": {"phase": "Pending", "conditions": [unscheduled]}})
            while self.no_node:  # noqa: ASYNC110 (a scheduler polls)
                await asyncio.sleep(0.05)
            if self.server.find("pods", pod["metadata"]["name"]) is None:
                return
        self.kubelet.run(pod)
        while (job := self.server.find("jobs", name)) is not None:
            left_s = job["spec"]["activeDeadlineSeconds"] - (time.monotonic() - began)
            if left_s > 0:
                await asyncio.sleep(min(left_s, 0.2))
                continue
            failed = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}
            self.server.put("jobs", {**job, "status": {"conditions": [failed]}})
            self.delete("pods", pod, None)
            return

    def delete(self, plural: str, thing: dict[str, Any], grace_s: float | None) -> None:
        """Begin a deletion: a Job goes after its pods, a pod after its processes, Secrets with their owner."""
        there = self.server.find(plural, thing["metadata"]["name"])
        if there is None:
            return
        if not there["metadata"].get("deletionTimestamp"):
            there["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            if plural == "jobs":
                there["metadata"]["finalizers"] = [FOREGROUND]
            self.server.put(plural, there)
        self.do(self._delete_pod(there, grace_s) if plural == "pods" else self._delete_job(there))

    async def _delete_job(self, job: dict[str, Any]) -> None:
        uid = job["metadata"]["uid"]

        for secret in self.server.owned("secrets", uid):
            self.server.drop("secrets", secret)
        for pod in self.server.owned("pods", uid):
            self.delete("pods", self.server.find("pods", pod), None)
        while self.server.owned("pods", uid):  # noqa: ASYNC110 (a controller polls)
            await asyncio.sleep(0.05)
        self.server.drop("jobs", job["metadata"]["name"])

    async def _delete_pod(self, pod: dict[str, Any], grace_s: float | None) -> None:
        name = pod["metadata"]["name"]
        if grace_s is None:
            grace_s = pod["spec"].get("terminationGracePeriodSeconds", 30)
        if grace_s == 0 or await self.kubelet.kill(name, grace_s):
            self.server.drop("pods", name)


MODELS = {"Job": "V1Job", "Secret": "V1Secret", "NetworkPolicy": "V1NetworkPolicy"}


def wrong_fields(thing: dict[str, Any]) -> list[str]:
    """What the official client's models do not know or take, as the API server's strict validation would name it."""
    from kubernetes.aio.client import models

    if thing["kind"] not in MODELS:
        return []
    model = getattr(models, MODELS[thing["kind"]])
    try:
        model.model_validate(thing)
    except ValidationError as error:
        return [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return [f'unknown field "{path}"' for path in _unknown(thing, model, "")]


def _unknown(value: Any, annotation: Any, path: str) -> typing.Iterator[str]:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        for one in inner if origin is not typing.Annotated else inner[:1]:
            if one is not type(None):
                yield from _unknown(value, one, path)
    elif origin is list and isinstance(value, list):
        for at, one in enumerate(value):
            yield from _unknown(one, inner[0], f"{path}[{at}]")
    elif origin is dict and isinstance(value, dict):
        for key, one in value.items():
            yield from _unknown(one, inner[1], f"{path}.{key}")
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel) and isinstance(value, dict):
        fields = {field.serialization_alias or name: field for name, field in annotation.model_fields.items()}
        for key, one in value.items():
            if key not in fields:
                yield f"{path}.{key}".lstrip(".")
            else:
                yield from _unknown(one, fields[key].annotation, f"{path}.{key}")
