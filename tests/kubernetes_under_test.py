"""The test server for Kubernetes as an engine that jobs of a server run on."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_under_test import EngineUnderTest
from job_server import processes_marked, shown_of
from kubernetes_client import KubernetesClient
from kubernetes_launches import BARE, IMAGE
from kubernetes_server.process import KubernetesServer, running
from process_signals import kill_marked
from real_server import wait_for

_KINDS = ("Job", "Pod", "Secret", "Service")
_OPTIONS = ("--nodes", "2", "--bare", BARE)
_AWAY_S = 3600


class KubernetesUnderTest(EngineUnderTest):
    """Its controller is the API: the rest of the control plane goes on without it."""

    kind = "kubernetes"
    gpus = 4
    cores = 8

    def __init__(self, cluster: KubernetesServer, api: KubernetesClient) -> None:
        self.cluster = cluster
        self.api = api

    @classmethod
    @contextlib.contextmanager
    def running(cls) -> Iterator[KubernetesUnderTest]:
        with (
            tempfile.TemporaryDirectory(prefix="tm-kubernetes-") as place,
            running(Path(place), *_OPTIONS, "--gpus", str(cls.gpus), "--cpu", str(cls.cores)) as cluster,
            contextlib.closing(KubernetesClient(cluster.kubeconfig)) as api,
        ):
            yield cls(cluster, api)

    @property
    def work(self) -> Path:
        """Pods have the files of this machine."""
        return self.cluster.directory / "work"

    def options(self) -> dict[str, Any]:
        return {
            "kubeconfig": str(self.cluster.kubeconfig),
            "namespace": self.api.namespace,
            "image": IMAGE,
            "work_dir": str(self.work),
            "node_lost_after_s": 1,
            "gpu_memory_mb": 81_920,
            "poll_s": 0.2,
        }

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

    def left(self, mark: str = "") -> list[str]:
        named = (each["metadata"]["name"] for kind in _KINDS for each in self.api.list(kind))
        # A pod's name has its index and a random word in addition.
        names = {"-".join(name.split("-")[:5]) for name in named if name.startswith("tm-")}
        return sorted(name for name in names if mark in name)

    def remove(self, job_id: str) -> None:
        (name,) = self.left(job_id)
        self.api.delete("Job", name, propagationPolicy="Background")

    def kill_controller(self) -> None:
        self.cluster.faults.api_refuse(seconds=_AWAY_S)

    def start_controller(self) -> None:
        self.cluster.faults.api_up()

    def kill_node(self) -> None:
        self.cluster.faults.node_killed(name="node-1")

    def start_node(self) -> None:
        self.cluster.faults.node_back(name="node-1")

        def is_ready() -> bool:
            conditions = self.api.get("Node", "node-1")["status"]["conditions"]
            return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)

        wait_for(is_ready, "the second node")

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
