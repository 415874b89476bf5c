"""Kubernetes as an engine that jobs of a server run on: the test server, or a real cluster."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_under_test import EngineUnderTest
from job_server import processes_marked, shown_of
from kubernetes_client import ApiError, KubernetesClient, Object, condition_of
from kubernetes_launches import BARE, IMAGE
from kubernetes_server.process import KubernetesServer, running
from process_signals import kill_marked
from real_server import wait_for

KUBECONFIG = os.environ.get("TRAINMASTER_TEST_KUBECONFIG", "")
"""Leads to a real cluster, which takes the place of the test server; TRAINMASTER_TEST_IMAGE then names an image with
`sh`, `getent` and `python3` that its nodes have. Where jobs of a server run on it, the nodes are on this machine."""
_KINDS = ("Job", "Pod", "Secret", "Service")
_OPTIONS = ("--nodes", "2", "--bare", BARE)
_AWAY_S = 3600


class KubernetesUnderTest(EngineUnderTest):
    """Its controller is the API: the rest of the control plane goes on without it."""

    kind = "kubernetes"
    gpus = 4

    def __init__(self, kubeconfig: Path, api: KubernetesClient, work: Path) -> None:
        self.kubeconfig = kubeconfig
        self.api = api
        self.work = work
        """Pods have the files of this machine."""

    @staticmethod
    def running() -> contextlib.AbstractContextManager[KubernetesUnderTest]:
        return RealKubernetes.given(Path(KUBECONFIG)) if KUBECONFIG else KubernetesOfTests.started()

    def options(self) -> dict[str, Any]:
        return {
            "kubeconfig": str(self.kubeconfig),
            "namespace": self.api.namespace,
            "image": IMAGE,
            "work_dir": str(self.work),
            "node_lost_after_s": 1,
            "gpu_memory_mb": 81_920,
            "poll_s": 0.2,
        }

    def left(self, mark: str = "") -> list[str]:
        named = (each["metadata"]["name"] for kind in _KINDS for each in self._listed(kind))
        # A pod's name has its index and a random word in addition.
        names = {"-".join(name.split("-")[:5]) for name in named if name.startswith("tm-")}
        return sorted(name for name in names if mark in name)

    def _listed(self, kind: str) -> list[Object]:
        """Also from an API server that has too many requests."""
        while True:
            try:
                return self.api.list(kind)
            except ApiError as error:
                if error.code != 429:
                    raise
                time.sleep(1)

    def remove(self, job_id: str) -> None:
        (name,) = self.left(job_id)
        self.api.delete("Job", name, propagationPolicy="Background")

    def kill_worker(self, job_id: str, node: int = 0) -> None:
        """kill -9 the worker of a node of the first attempt; its claim has its number inside of its pod."""

        def found() -> list[int]:
            own = processes_marked(f"{job_id}-1-{node}")  # the name of its host
            return [pid for pid in own if shown_of(pid, "cmdline").endswith(b".pyz\0remote\0")]

        for pid in wait_for(found, f"the worker of {job_id}"):
            # All that a worker has forked ends with it, which may be the first of them.
            with contextlib.suppress(ProcessLookupError):
                kill_marked(pid, "remote")

    def shown(self, job_id: str) -> str:
        """All that whoever may list everything but Secrets sees of a job."""
        listed = [each for kind in ("Job", "Pod", "Service", "Event") for each in self.api.list(kind)]
        return json.dumps([each for each in listed if job_id in json.dumps(each)], ensure_ascii=False)


class KubernetesOfTests(KubernetesUnderTest):
    """The test server."""

    cores = 8

    def __init__(self, cluster: KubernetesServer, api: KubernetesClient) -> None:
        super().__init__(cluster.kubeconfig, api, cluster.directory / "work")
        self.cluster = cluster

    @classmethod
    @contextlib.contextmanager
    def started(cls) -> Iterator[KubernetesOfTests]:
        with (
            tempfile.TemporaryDirectory(prefix="tm-kubernetes-") as place,
            running(Path(place), *_OPTIONS, "--gpus", str(cls.gpus), "--cpu", str(cls.cores)) as cluster,
            contextlib.closing(KubernetesClient(cluster.kubeconfig)) as api,
        ):
            yield cls(cluster, api)

    def check_load(self, directory: Path, attempts: int) -> None:
        """Each object is made once; all that happens to them is watched."""
        asked = {(resource, verb): count for _, resource, verb, count in self.cluster.faults.asked(user="admin")}
        # A few more for those that were under way when the leader was killed.
        for resource in ("jobs", "secrets"):
            assert attempts <= asked[resource, "create"] < 1.05 * attempts
        assert asked.get(("pods", "get"), 0) == 0
        assert asked.get(("pods/log", "get"), 0) == 0

    @contextlib.contextmanager
    def slow(self, directory: Path) -> Iterator[dict[str, Any]]:
        self.cluster.faults.api_slow(seconds=1)
        self.cluster.faults.api_throttle(every=3)
        try:
            yield {}
        finally:
            self.cluster.faults.clear()

    def kill_controller(self) -> None:
        self.cluster.faults.api_refuse(seconds=_AWAY_S)

    def start_controller(self) -> None:
        self.cluster.faults.api_up()

    def kill_node(self) -> None:
        self.cluster.faults.node_killed(name="node-1")

    def start_node(self) -> None:
        self.cluster.faults.node_back(name="node-1")

        def is_ready() -> bool:
            return condition_of(self.api.get("Node", "node-1"), "Ready").get("status") == "True"

        wait_for(is_ready, "the second node")


class RealKubernetes(KubernetesUnderTest):
    """A real cluster whose nodes are on this machine: its pods get the files of this machine that tests need, and the
    nodes get GPUs that are none. A test that needs its faults is skipped."""

    def __init__(self, kubeconfig: Path, api: KubernetesClient, work: Path, gpu_resource: str) -> None:
        super().__init__(kubeconfig, api, work)
        self.gpu_resource = gpu_resource
        nodes = api.list("Node")
        self.cores = min(int(each["status"]["allocatable"]["cpu"]) for each in nodes)
        addresses = (each for node in nodes for each in node["status"]["addresses"])
        self.address = next(str(each["address"]) for each in addresses if each["type"] == "InternalIP")

    @classmethod
    @contextlib.contextmanager
    def given(cls, kubeconfig: Path) -> Iterator[RealKubernetes]:
        name = f"test-{secrets.token_hex(4)}"
        resource = f"tests.example/{name}"
        with (
            tempfile.TemporaryDirectory(prefix="tm-kubernetes-") as place,
            contextlib.closing(KubernetesClient(kubeconfig, name)) as api,
        ):
            api.create({"kind": "Namespace", "metadata": {"name": name}})
            # One node takes the place of two, as pods of a gang may share it.
            set_amount(api, resource, str(cls.gpus * math.ceil(2 / len(api.list("Node")))))
            try:
                yield cls(kubeconfig, api, Path(place) / "work", resource)
            finally:
                set_amount(api, resource, None)
                api.delete("Namespace", name)

    def options(self) -> dict[str, Any]:
        return {**super().options(), "gpu_resource": self.gpu_resource, "pod_template": json.dumps(with_this_machine())}

    def environment(self) -> dict[str, str]:
        """Pods reach a server at the address of their node."""
        private = {"TRAINMASTER_PRIVATE_URLS": "1", "TRAINMASTER_WEBHOOK_PRIVATE_ADDRESSES": "1"}
        return {"TRAINMASTER_HOST": self.address, "TRAINMASTER_BEHIND_PROXY": "1", **private}

    def check_load(self, directory: Path, attempts: int) -> None:
        """What it is asked is not counted."""

    def slow(self, directory: Path) -> contextlib.AbstractContextManager[dict[str, Any]]:
        pytest.skip("a real cluster is not made slow")

    def kill_controller(self) -> None:
        pytest.skip("a real cluster's API server is not ended")

    def start_controller(self) -> None:
        """It was not ended."""

    def kill_node(self) -> None:
        pytest.skip("a real cluster's node is not ended")

    def start_node(self) -> None:
        """It was not ended."""


def set_amount(api: KubernetesClient, resource: str, amount: str | None) -> None:
    """What every node has of a resource that nobody else asks for."""
    for node in api.list("Node"):
        changes = {"capacity": {resource: amount}, "allocatable": {resource: amount}}
        api.patch("Node", node["metadata"]["name"], {"status": changes}, below="/status")


def with_this_machine() -> dict[str, Any]:
    """What a pod needs to have the programs of this machine, the code under test and what tests write."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
    checkout = str(Path(__file__).parents[1])
    folders = {"/usr": True, sys.base_prefix: True, sys.prefix: True, checkout: True, tempfile.gettempdir(): False}
    wanted = {place: read_only for place, read_only in folders.items() if not _is_within(place, folders)}
    volumes = [{"name": f"host-{i}", "hostPath": {"path": place}} for i, place in enumerate(wanted)]
    mounts = [
        {"name": f"host-{i}", "mountPath": place, "readOnly": read_only}
        for i, (place, read_only) in enumerate(wanted.items())
    ]
    worker = {"name": "worker", "env": [{"name": "PATH", "value": path}], "volumeMounts": mounts}
    return {"spec": {"volumes": volumes, "containers": [worker]}}


def _is_within(place: str, others: dict[str, bool]) -> bool:
    return any(place != other and Path(place).is_relative_to(other) for other in others)
