"""A Kubernetes cluster for the tests of this folder: the test server, or the one of TRAINMASTER_TEST_KUBECONFIG."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_attempts import Launch, MakeEngine

from kubernetes_client import ApiError, KubernetesClient, wait_for
from kubernetes_launches import IMAGE, kubernetes_launch
from kubernetes_server.process import KubernetesServer, running
from kubernetes_under_test import KUBECONFIG
from trainmaster.backends.kubernetes.client import KubernetesEngine
from trainmaster.backends.kubernetes.options import KubernetesOptions

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def test_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesServer]:
    with running(tmp_path_factory.mktemp("kubernetes"), "--nodes", "2", "--trainer", "2.3") as server:
        yield server


@pytest.fixture(scope="session")
def kubeconfig(request: pytest.FixtureRequest) -> Path:
    if KUBECONFIG:
        return Path(KUBECONFIG)
    server: KubernetesServer = request.getfixturevalue("test_server")
    return server.kubeconfig


@pytest.fixture(scope="session")
def cluster(kubeconfig: Path) -> Iterator[KubernetesClient]:
    client = KubernetesClient(kubeconfig)
    yield client
    client.close()


@pytest.fixture
def api(cluster: KubernetesClient) -> Iterator[KubernetesClient]:
    """A client in a namespace of its own, which is deleted after the test."""
    name = f"test-{secrets.token_hex(4)}"
    cluster.create({"kind": "Namespace", "metadata": {"name": name}})
    client = cluster.within(name)

    def has_account() -> bool:
        try:
            return bool(client.get("ServiceAccount", "default"))
        except ApiError:
            return False

    wait_for(has_account, "the default service account")
    yield client
    client.close()
    cluster.delete("Namespace", name)


@pytest.fixture
def unit(cluster: KubernetesClient) -> Iterator[str]:
    """A resource that one node has four of, and no other node has."""
    name = f"tests.example/{secrets.token_hex(4)}"
    node = min(
        (each for each in cluster.list("Node") if not each["spec"].get("taints")),
        key=lambda each: str(each["metadata"]["name"]),
    )["metadata"]["name"]
    amounts = {"capacity": {name: "4"}, "allocatable": {name: "4"}}
    cluster.patch("Node", node, {"status": amounts}, below="/status")
    yield name
    nothing = {"capacity": {name: None}, "allocatable": {name: None}}
    cluster.patch("Node", node, {"status": nothing}, below="/status")


@pytest.fixture
def instance() -> str:
    return f"t{next(_NUMBERS)}"


@pytest.fixture
def make_engine(api: KubernetesClient, instance: str) -> Iterator[MakeEngine]:
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> KubernetesEngine:
            given = {"kubeconfig": str(api.kubeconfig), "namespace": api.namespace, "image": IMAGE, **options}
            own = given.pop("instance", instance)
            engine = KubernetesEngine("k8s", own, KubernetesOptions(**given))
            stack.callback(engine.close)
            return engine

        yield make


@pytest.fixture
def engine(make_engine: MakeEngine) -> KubernetesEngine:
    return make_engine()


@pytest.fixture
def launch(instance: str) -> Launch:
    return lambda script, **values: kubernetes_launch(script, instance=instance, **values)
