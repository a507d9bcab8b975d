"""Whether a cluster can be used: it answers, has the namespace, and allows what is needed."""

from __future__ import annotations

import asyncio
from typing import Any

from aglite.config import Recipe
from aglite.errors import RecipeError
from aglite.rollouts.backends.kube.api import Api, ApiError, refused
from aglite.rollouts.backends.kube.manifests import Templates, gateway_of
from aglite.rollouts.causes import BackendError

PATIENCE_S = 5.0

NEEDED = (
    ("create", "batch", "jobs", ""),
    ("get", "batch", "jobs", ""),
    ("list", "batch", "jobs", ""),
    ("patch", "batch", "jobs", ""),
    ("delete", "batch", "jobs", ""),
    ("list", "", "pods", ""),
    ("watch", "", "pods", ""),
    ("get", "", "pods", "log"),
    ("get", "", "pods", "exec"),
    ("create", "", "pods", "exec"),
    ("create", "", "secrets", ""),
    ("get", "", "secrets", ""),
    ("list", "", "secrets", ""),
    ("delete", "", "secrets", ""),
)
"""(verb, API group, resource, subresource) that a run needs in its namespace."""
SEALED = tuple((verb, "networking.k8s.io", "networkpolicies", "") for verb in ("create", "get", "patch", "delete"))
"""What it needs besides with `network: sealed`."""


async def check_cluster(api: Api, sealed: bool) -> str:
    """The version of the cluster. Raises RecipeError if it does not answer or does not allow what is needed."""
    try:
        version = (await api.call("GET", "/version", patience_s=PATIENCE_S))["gitVersion"]
        await _check_namespace(api)
        needed = [*NEEDED, *(SEALED if sealed else ())]
        allowed = await asyncio.gather(*(_may(api, *one) for one in needed))
    except BackendError as error:
        raise RecipeError(
            f"agent.backend: no API server answers at {api.host}: {error.cause.detail}",
            "start the cluster, or choose another with agent.kubernetes.context (`kubectl config get-contexts`)",
        ) from None
    except ApiError as error:
        raise refused(error, f"namespace {api.namespace}") from None
    missing = [one for one, may in zip(needed, allowed, strict=True) if not may]
    if missing:
        words = ", ".join(f"{verb} {resource}{sub and f'/{sub}'}" for verb, _, resource, sub in missing)
        raise RecipeError(
            f"agent.backend: in namespace {api.namespace} you may not {words}",
            "ask for the Role that docs/sandboxes.md has, or choose another agent.kubernetes.namespace",
        )
    return str(version)


async def _check_namespace(api: Api) -> None:
    try:
        await api.call("GET", f"/api/v1/namespaces/{api.namespace}", patience_s=PATIENCE_S)
    except ApiError as error:
        if error.status != 403:  # whoever may not look at namespaces may have one all the same
            raise


async def _may(api: Api, verb: str, group: str, resource: str, subresource: str) -> bool:
    attributes = {"namespace": api.namespace, "verb": verb, "group": group, "resource": resource}
    spec: dict[str, Any] = {"resourceAttributes": {**attributes, "subresource": subresource}}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": spec}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answer = await api.call("POST", path, body, patience_s=PATIENCE_S)
    return bool(answer["status"]["allowed"])


async def check_recipe(recipe: Recipe) -> dict[str, Any]:
    """Raise RecipeError if what a recipe says of its cluster does not hold. Changes nothing there. Returns what was
    found: `version`, `host`, `namespace`, `gateway`."""
    Templates(recipe)
    gateway = await asyncio.to_thread(gateway_of, str(recipe.gateway.public_url))
    api = await Api.connect(recipe.agent.kubernetes)
    try:
        version = await check_cluster(api, recipe.agent.network == "sealed")
        return {"version": version, "host": api.host, "namespace": api.namespace, "gateway": gateway}
    finally:
        await api.close()
