"""The whole cluster: its objects, and everything that acts on them."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

from kubernetes_server.api.lists import Lists
from kubernetes_server.api.users import MASTERS, User, Users, service_account
from kubernetes_server.api.watches import Watches
from kubernetes_server.controllers.endpoints import EndpointsController, host_lines
from kubernetes_server.controllers.garbage import GarbageCollector
from kubernetes_server.controllers.jobs import JobController
from kubernetes_server.controllers.loop import Controller
from kubernetes_server.controllers.namespaces import NamespaceController
from kubernetes_server.controllers.nodes import LEASE_NAMESPACE, NodeController
from kubernetes_server.events import EventRecorder
from kubernetes_server.faults.state import ApiFaults
from kubernetes_server.kubelet.fake import FakeKubelet
from kubernetes_server.kubelet.kubelet import Kubelet
from kubernetes_server.objects import Object
from kubernetes_server.operations import Operations
from kubernetes_server.resources import ENDPOINTS, NAMESPACES, PRIORITY_CLASSES, Resources
from kubernetes_server.runtime.client import RuntimeClient
from kubernetes_server.scheduling.scheduler import Scheduler
from kubernetes_server.settings import ClusterSettings
from kubernetes_server.statuses import StatusError
from kubernetes_server.store import Store
from kubernetes_server.trainer.install import install

PROGRAMS = tuple(sorted({os.path.realpath(f"{place}/bin") for place in ("", "/usr", sys.prefix, sys.base_prefix)}))
"""The folders of this machine in which images have their programs."""


class Cluster:
    def __init__(self, settings: ClusterSettings, certificate: str) -> None:
        self.settings = settings
        self.certificate = certificate
        self.name = f"k8s-test-{os.getpid()}"
        self.url = ""
        self.memory_folder = Path("/dev/shm") / self.name
        self.store = Store()
        self.resources = Resources()
        self.operations = Operations(self.store, self.resources)
        self.events = EventRecorder(self.operations)
        self.users = Users(self.store)
        self.admin_token = self.users.add(User("admin", (MASTERS, "system:authenticated")))
        self.lists = Lists(self.store)
        self.watches = Watches(self.store, settings.timing.bookmark_s)
        self.faults = ApiFaults()
        self.runtime = RuntimeClient(self.memory_folder)
        self.scheduler = Scheduler(self)
        self.controllers: list[Controller] = [
            NamespaceController(self),
            JobController(self),
            GarbageCollector(self),
            EndpointsController(self),
        ]
        self.nodes = NodeController(self)
        kubelet = FakeKubelet if settings.fake else Kubelet
        self.kubelets = {name: kubelet(self, name) for name in (f"node-{i}" for i in range(settings.nodes))}
        self._tasks: list[asyncio.Task[None]] = []
        # Other clusters on this machine give other addresses to their pods.
        self._network = (random.randint(64, 127), random.randint(1, 250))
        self._addresses = itertools.count(1)
        self._tokens: dict[tuple[str, str], str] = {}

    async def start(self) -> None:
        self.settings.directory.mkdir(parents=True, exist_ok=True)
        await self.runtime.open()
        for name in ("default", "kube-system", "kube-public", LEASE_NAMESPACE):
            self.operations.create(NAMESPACES, "", {"metadata": {"name": name}})
        for name, value in (("system-cluster-critical", 2_000_000_000), ("system-node-critical", 2_000_001_000)):
            self.operations.create(PRIORITY_CLASSES, "", {"metadata": {"name": name}, "value": value})
        for kubelet in self.kubelets.values():
            kubelet.register()
        if self.settings.trainer:
            self.controllers += install(self, self.settings.trainer)
        # A version from before can't be watched, as on a server that has run for a while.
        self.store.compact()
        runners: list[Any] = [*self.controllers, self.nodes, self.scheduler, *self.kubelets.values()]
        self._tasks = [asyncio.create_task(each.run()) for each in runners]

    async def stop(self) -> None:
        """End everything, and every process of every pod."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for kubelet in self.kubelets.values():
            await kubelet.close()
        await self.runtime.close()
        for name in ("pods", "claims"):
            shutil.rmtree(self.settings.directory / name, ignore_errors=True)

    @staticmethod
    def time() -> float:
        return asyncio.get_running_loop().time()

    def kubelet_of(self, pod: Object) -> Kubelet:
        """
        Raises:
            StatusError: the pod is on no node of this cluster.
        """
        name = pod["spec"].get("nodeName", "")
        if name not in self.kubelets:
            raise StatusError(500, "InternalError", f"dial tcp: lookup {name}: no such host")
        return self.kubelets[name]

    # -- what pods get --

    def new_address(self) -> str:
        number = next(self._addresses)
        return f"127.{self._network[0]}.{(self._network[1] + number // 254) % 256}.{number % 254 + 1}"

    def host_lines(self, namespace: str) -> list[str]:
        return host_lines(self.store.objects(ENDPOINTS.store_key, namespace))

    def names_changed(self, namespace: str) -> None:
        lines = self.host_lines(namespace)
        for kubelet in self.kubelets.values():
            kubelet.names_changed(namespace, lines)

    def service_environment(self) -> dict[str, str]:
        host, _, port = self.url.removeprefix("https://").partition(":")
        return {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}

    def service_account_token(self, namespace: str, name: str) -> str:
        if (namespace, name) not in self._tokens:
            self._tokens[namespace, name] = self.users.add(service_account(namespace, name))
        return self._tokens[namespace, name]

    def has_image(self, image: str) -> bool:
        return image not in self.faults.missing_images and (not self.settings.images or image in self.settings.images)

    def image(self, image: str) -> dict[str, Any]:
        """Every image is this machine, with the Python that runs the tests."""
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        lacks = PROGRAMS if image in self.settings.bare else ()
        return {"entrypoint": ["/bin/sh"], "command": [], "environment": {"PATH": path}, "folder": "/", "lacks": lacks}
