"""Where the agents of the rollout tests run."""

import os

import pytest
from cluster import Cluster
from in_cluster import IN_CLUSTER

from aglite.errors import AgliteError
from aglite.rollouts.backends.engine import LABEL_RUN, connect

IMAGE = os.environ.get("AGLITE_TEST_IMAGE", "aglite/python")


@pytest.fixture(scope="session")
def docker_client():
    try:
        client = connect(timeout_s=60)
    except AgliteError as error:
        pytest.skip(f"{error.message} ({error.mend})")
    yield client
    client.close()


@pytest.fixture(scope="session")
def image(docker_client):
    if not docker_client.images(name=IMAGE):
        pytest.skip(f"there is no image {IMAGE} (bash images/build.sh, or with --offline)")
    return IMAGE


@pytest.fixture
def containers(docker_client, tmp_path):
    """The containers there are of the run in `tmp_path/run`: a function of the test's; no container and no volume at
    its end."""

    def found(role=None):
        labels = [f"{LABEL_RUN}={(tmp_path / 'run').resolve()}", *([f"aglite.role={role}"] if role else [])]
        return docker_client.containers(all=True, filters={"label": labels})

    yield found
    assert found() == []
    run = {"label": [f"{LABEL_RUN}={(tmp_path / 'run').resolve()}"]}
    assert not docker_client.volumes(filters=run)["Volumes"]


@pytest.fixture
async def cluster(tmp_path, monkeypatch):
    """A Kubernetes cluster; nothing of a run is left in it at its end."""
    if os.getuid():
        pytest.skip("only root can run pods in process namespaces of their own")
    async with Cluster(tmp_path) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield cluster
        assert cluster.left() == []


@pytest.fixture(params=["local", "kubernetes", pytest.param("docker", marks=pytest.mark.docker)])
def place(request):
    """The part of an agent section that says where it runs."""
    if request.param == "local":
        return {}
    if request.param == "kubernetes":
        request.getfixturevalue("cluster")
        return IN_CLUSTER
    request.getfixturevalue("containers")
    return {"image": request.getfixturevalue("image")}
