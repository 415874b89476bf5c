"""The backends that the suite runs over. A new one is a class here, and its name in `BACKENDS_UNDER_TEST`.

A class says how to start a server whose default backend it is, and the few things that no API tells: how a node is
lost, what an engine shows of a job, and what is left of one. What a backend cannot do it declares in its
`Capabilities`; the suite asks for no more.
"""

from __future__ import annotations

import abc
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster_engines import RayUnderTest, SlurmRestUnderTest, SlurmUnderTest
from cluster_servers import ClusterServer
from container_engine import missing, python_image, running_engine
from container_servers import SECRETS, ContainerServer
from engine_under_test import wait_until_nothing_is_left
from job_server import JobServer, processes_marked
from kubernetes_under_test import KubernetesUnderTest
from local_servers import LocalServer, quiet_port
from process_signals import kill_claimant
from ray_cluster import missing as no_ray
from real_server import wait_for
from slurm_cluster import missing as no_slurm
from slurm_cluster import running_cluster
from slurm_servers import SlurmServer
from trainmaster.backends import CLUSTER_KINDS, capabilities_of
from trainmaster.backends.base import Capabilities
from trainmaster.protocol.launch import KUBERNETES, RAY, SLURM
from trainmaster.server.failpoints import ELSEWHERE_VARIABLE
from wheel_index import WheelIndex

SETTINGS = {"TRAINMASTER_SIMULATED_GPUS": "H100-80GB:2", "TRAINMASTER_STALLED_AFTER_S": "2"}
"""Of every server of the suite: two GPUs to compete for, and stalls that a test can wait for."""


class BackendUnderTest(abc.ABC):
    """A server with one of the backends as its default."""

    def __init__(self, name: str, server: JobServer, capabilities: Capabilities | None = None) -> None:
        self.server = server
        self.capabilities = capabilities or capabilities_of(name)

    @abc.abstractmethod
    def lose_node(self, job_id: str, node: int = 0) -> None:
        """Kill the worker of a node of the first attempt, with no chance to say anything."""

    @abc.abstractmethod
    def wait_until_nothing_is_left(self, job_id: str) -> None:
        """Wait until there is nothing of a job but what the server keeps of it."""

    @abc.abstractmethod
    def end_all_jobs(self) -> None:
        """Cancel what still runs; nothing may be left of any job, and nothing booked."""

    def shown_by_the_engine(self, job_id: str) -> str:
        """All that an engine, or what was handed to it, tells of a running job to whoever may look."""
        del job_id
        return ""

    def with_packages(self, index: WheelIndex) -> dict[str, Any]:
        """What a workload has to say so that its packages come from an index of the test's."""
        return {"index_urls": [index.url]}

    def caches(self) -> Path:
        """Where nodes keep what jobs of an account share."""
        return self.server.directory / "cache"

    def processes(self, mark: str) -> set[int]:
        """What runs somewhere with a text in its arguments or variables; the id of a job is one of them."""
        return processes_marked(mark)


class Local(BackendUnderTest):
    """Processes of this machine."""

    server: LocalServer

    @classmethod
    @contextlib.contextmanager
    def over(cls, transport: str, home: Path) -> Iterator[Local]:
        """With workers that report over a transport: over HTTP as from another machine, with no shared files at all."""
        elsewhere = {ELSEWHERE_VARIABLE: "1"} if transport == "http" else {}
        server = LocalServer(home / "data", transport, **SETTINGS, **elsewhere)
        with _running(server):
            yield cls("local", server)

    def lose_node(self, job_id: str, node: int = 0) -> None:
        kill_claimant(self.server.run_directory(job_id).claimant(node))

    def wait_until_nothing_is_left(self, job_id: str) -> None:
        wait_for(lambda: not self.processes(job_id), f"the end of the processes of {job_id}")

    def end_all_jobs(self) -> None:
        self.server.end_all_jobs()


class Containers(BackendUnderTest):
    """Real containers of this machine's engine."""

    server: ContainerServer

    @classmethod
    @contextlib.contextmanager
    def on_podman(cls, home: Path) -> Iterator[Containers]:
        """On an engine of the suite's own."""
        with running_engine() as engine:
            server = ContainerServer(home, engine, python_image(engine))
            server.environment |= SETTINGS
            with _running(server):
                yield cls("container", server)

    def lose_node(self, job_id: str, node: int = 0) -> None:
        self.server.engine.podman("kill", f"tm-{job_id}.1-{node}")

    def wait_until_nothing_is_left(self, job_id: str) -> None:
        self.server.wait_until_cleared(job_id)
        # The engine's monitor of a container ends a moment after the container is gone.
        wait_for(lambda: not self.processes(job_id), f"the end of the processes of {job_id}")

    def end_all_jobs(self) -> None:
        self.server.end_all_jobs()

    def shown_by_the_engine(self, job_id: str) -> str:
        names = self.server.containers(job_id)
        assert names
        handed = [path.read_text() for path in SECRETS.glob(f"tm-{job_id}*/*")]
        return "\n".join([*(self.server.engine.podman("inspect", name) for name in names), *handed])

    def with_packages(self, index: WheelIndex) -> dict[str, Any]:
        volume = {"source": str(index.directory), "target": "/index", "read_only": True}
        return {"index_urls": ["file:///index"], "volumes": [volume]}


class Slurm(BackendUnderTest):
    """The nodes of a real Slurm cluster."""

    server: SlurmServer

    @classmethod
    @contextlib.contextmanager
    def on_cluster(cls, home: Path, under_test: type[SlurmUnderTest] = SlurmUnderTest) -> Iterator[Slurm]:
        """On a cluster of the suite's own, with two nodes."""
        with running_cluster() as cluster:
            server = SlurmServer(home / "data", cluster, quiet_port(), under_test=under_test)
            server.environment |= SETTINGS
            with _running(server):
                yield cls("hpc", server, CLUSTER_KINDS[SLURM].capabilities)

    def lose_node(self, job_id: str, node: int = 0) -> None:
        kill_claimant(self.server.run_directory(job_id).claimant(node))

    def wait_until_nothing_is_left(self, job_id: str) -> None:
        wait_for(lambda: not self.server.jobs_on_cluster(job_id), f"the end of {job_id} on the cluster")
        wait_for(lambda: not self.processes(job_id), f"the end of the processes of {job_id}")

    def end_all_jobs(self) -> None:
        self.server.end_all_jobs()

    def caches(self) -> Path:
        return self.server.cluster.directory / "work"

    def shown_by_the_engine(self, job_id: str) -> str:
        (name,) = self.server.jobs_on_cluster(job_id)
        number = self.server.cluster.run("squeue", "--noheader", f"--name={name}", "--format=%A").strip()
        return self.server.cluster.scontrol("-dd", "show", "job", number)


class Ray(BackendUnderTest):
    """The nodes of a real Ray cluster."""

    server: ClusterServer

    def __init__(self, server: ClusterServer, engine: RayUnderTest) -> None:
        super().__init__("pool", server, CLUSTER_KINDS[RAY].capabilities)
        self.engine = engine

    @classmethod
    @contextlib.contextmanager
    def on_cluster(cls, home: Path) -> Iterator[Ray]:
        """On a cluster of the suite's own, with two nodes."""
        with RayUnderTest.running() as engine:
            server = ClusterServer(home / "data", quiet_port(), {"pool": engine}, **SETTINGS)
            with _running(server):
                yield cls(server, engine)

    def lose_node(self, job_id: str, node: int = 0) -> None:
        kill_claimant(self.server.run_directory(job_id).claimant(node))

    def wait_until_nothing_is_left(self, job_id: str) -> None:
        wait_until_nothing_is_left(self.engine, job_id)
        wait_for(lambda: not self.processes(job_id), f"the end of the processes of {job_id}")

    def end_all_jobs(self) -> None:
        self.server.end_all_jobs()

    def caches(self) -> Path:
        return self.engine.cluster.directory / "work"

    def shown_by_the_engine(self, job_id: str) -> str:
        kinds = ("actors", "placement_groups", "tasks", "workers", "runtime_envs")
        shown = [self.engine.cluster.get(f"/api/v0/{kind}", detail=1, limit=1000) for kind in kinds]
        shown += [self.engine.cluster.get("/api/jobs/"), self.engine.cluster.get("/logical/actors")]
        assert job_id in json.dumps(shown)
        return json.dumps(shown, ensure_ascii=False)


class Kubernetes(BackendUnderTest):
    """Pods of the test server for Kubernetes."""

    server: ClusterServer

    def __init__(self, server: ClusterServer, engine: KubernetesUnderTest) -> None:
        super().__init__("k8s", server, CLUSTER_KINDS[KUBERNETES].capabilities)
        self.engine = engine

    @classmethod
    @contextlib.contextmanager
    def on_cluster(cls, home: Path) -> Iterator[Kubernetes]:
        """On a cluster of the suite's own, with two nodes."""
        with KubernetesUnderTest.running() as engine:
            server = ClusterServer(home / "data", quiet_port(), {"k8s": engine}, **SETTINGS)
            with _running(server):
                yield cls(server, engine)

    def lose_node(self, job_id: str, node: int = 0) -> None:
        self.engine.kill_worker(job_id, node)

    def wait_until_nothing_is_left(self, job_id: str) -> None:
        wait_until_nothing_is_left(self.engine, job_id)
        wait_for(lambda: not self.processes(job_id), f"the end of the processes of {job_id}")

    def end_all_jobs(self) -> None:
        self.server.end_all_jobs()

    def caches(self) -> Path:
        return self.engine.work

    def shown_by_the_engine(self, job_id: str) -> str:
        return self.engine.shown(job_id)


@contextlib.contextmanager
def _running(server: JobServer) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.callback(server.clean_up)
        server.start()
        yield


BACKENDS_UNDER_TEST: Mapping[str, Callable[[Path], contextlib.AbstractContextManager[BackendUnderTest]]] = {
    "local-files": lambda home: Local.over("files", home),
    "local-http": lambda home: Local.over("http", home),
    "container": Containers.on_podman,
    "slurm": Slurm.on_cluster,
    "slurmrestd": lambda home: Slurm.on_cluster(home, SlurmRestUnderTest),
    "ray": Ray.on_cluster,
    "kubernetes": Kubernetes.on_cluster,
}
"""Name -> what runs it, with its server, on a directory of its own."""
MISSING: Mapping[str, Callable[[], str | None]] = {
    "container": missing,
    "slurm": no_slurm,
    "slurmrestd": no_slurm,
    "ray": no_ray,
}
"""Name -> why it cannot be run on this machine; None where it can."""
LONG = frozenset({"ray", "slurmrestd"})
"""Only in `make test-long`: a Ray cluster takes long to start, and much memory; jobs on Slurm run in the same way,
however it is reached."""
PARAMS = [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in BACKENDS_UNDER_TEST]


def long_on(*names: str) -> pytest.MarkDecorator:
    """Mark a test that only `make test-long` runs over these backends: in CI the others prove as much."""
    are_long = LONG.union(names)
    every = [pytest.param(name, marks=pytest.mark.long if name in are_long else ()) for name in BACKENDS_UNDER_TEST]
    return pytest.mark.parametrize("backend", every, indirect=True, scope="module")
