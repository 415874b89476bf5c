"""The kubelet of one node."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from kubernetes_server.controllers.nodes import LEASE_NAMESPACE
from kubernetes_server.kubelet.pod_worker import PodWorker
from kubernetes_server.objects import Object, is_deleting, micro_timestamp, set_condition, timestamp
from kubernetes_server.resources import LEASES, NODES, PODS
from kubernetes_server.statuses import StatusError
from kubernetes_server.store import Change

if TYPE_CHECKING:
    from kubernetes_server.cluster import Cluster

_WELL = {
    "MemoryPressure": ("False", "KubeletHasSufficientMemory", "kubelet has sufficient memory available"),
    "DiskPressure": ("False", "KubeletHasNoDiskPressure", "kubelet has no disk pressure"),
    "PIDPressure": ("False", "KubeletHasSufficientPID", "kubelet has sufficient PID available"),
    "Ready": ("True", "KubeletReady", "kubelet is posting ready status"),
}
DISK_PRESSURE = "node.kubernetes.io/disk-pressure"
_LOW_ON_DISK = (
    "The node was low on resource: ephemeral-storage. Threshold quantity: 5Gi, available: 1Gi. "
    "Container main was using 4Gi, request is 0, has larger consumption of ephemeral-storage. "
)


class Kubelet:
    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.up = asyncio.Event()
        """Whether it works; containers run on without it."""
        self.up.set()
        self.was_killed = False
        """Whether the containers have just died with their node."""
        self.disk_full = False
        self._workers: dict[str, PodWorker] = {}
        self._ending: set[asyncio.Task[None]] = set()
        cluster.store.subscribe(PODS.store_key, self._pod_changed)

    def register(self) -> None:
        """Make the node."""
        settings = self.cluster.settings
        capacity = {"cpu": settings.cpu, "memory": settings.memory, "pods": str(settings.max_pods)}
        capacity["ephemeral-storage"] = "100Gi"
        if settings.gpus:
            capacity["nvidia.com/gpu"] = str(settings.gpus)
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            "beta.kubernetes.io/os": "linux",
            "beta.kubernetes.io/arch": "amd64",
        }
        addresses = [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": self.name}]
        info = {"kubeletVersion": "v1.32.0-test", "containerRuntimeVersion": "test://1", "osImage": "this machine"}
        more = ("architecture", "bootID", "kernelVersion", "kubeProxyVersion", "machineID", "operatingSystem")
        status = {
            "capacity": capacity,
            "allocatable": dict(capacity),
            "addresses": addresses,
            "nodeInfo": {**dict.fromkeys((*more, "systemUUID"), ""), **info},
        }
        self.cluster.operations.create(
            NODES, "", {"metadata": {"name": self.name, "labels": labels}, "spec": {}, "status": status}
        )
        self._beat()
        self._report()

    async def run(self) -> None:
        """Renew the lease of the node."""
        while True:
            await asyncio.sleep(self.cluster.settings.timing.node_heartbeat_s)
            if self.up.is_set():
                self._beat()

    # -- faults --

    def stop(self) -> None:
        """The kubelet stops; containers run on."""
        self.up.clear()

    def kill(self) -> None:
        """The node loses power."""
        self.up.clear()
        self.was_killed = True
        for worker in self._workers.values():
            worker.kill()

    async def start(self) -> None:
        """The kubelet is back, after either."""
        if self.was_killed:
            # All have noticed that their containers are gone before it is forgotten why.
            for worker in self._workers.values():
                await worker.note_deaths()
            self.was_killed = False
        self.up.set()
        self._beat()
        self._report()
        present = {}
        for pod in self.cluster.store.objects(PODS.store_key):
            if pod["spec"].get("nodeName") == self.name:
                present[pod["metadata"]["uid"]] = pod
                self._follow(pod)
        for uid, worker in list(self._workers.items()):
            if uid in present:
                worker.publish()
            else:
                self._remove(uid)

    def fill_disk(self, full: bool) -> None:
        """DiskPressure: no new pods, and the present ones are evicted."""
        self.disk_full = full
        self._report()

        def taint(node: Object) -> None:
            taints = [each for each in node["spec"].get("taints") or () if each["key"] != DISK_PRESSURE]
            if full:
                taints.append({"key": DISK_PRESSURE, "effect": "NoSchedule", "timeAdded": timestamp()})
            if taints:
                node["spec"]["taints"] = taints
            else:
                node["spec"].pop("taints", None)

        self.cluster.operations.modify(NODES, ("", self.name), taint)
        if full:
            for worker in list(self._workers.values()):
                self.evict(worker.key)

    def evict(self, key: tuple[str, str], text: str = "") -> None:
        """End a pod that has written more than it may, or for want of disk; it stays, as Failed."""
        pod = self.cluster.store.get(PODS.store_key, key)
        if pod is None or pod["status"]["phase"] in ("Succeeded", "Failed"):
            return
        is_disrupted = not text
        text = text or _LOW_ON_DISK
        self.cluster.events.record(pod, "Evicted", text, component="kubelet", warning=True, host=self.name)

        def mark(pod: Object) -> None:
            set_condition(
                pod["status"].setdefault("conditions", []),
                "DisruptionTarget",
                "True",
                reason="TerminationByKubelet",
                message=text,
            )

        if is_disrupted:
            self.cluster.operations.modify(PODS, key, mark)
        worker = self._workers.get(pod["metadata"]["uid"])
        if worker is not None:
            worker.stop(1, "Evicted", text)

    # -- logs and names --

    def log_path(self, pod: Object, name: str, *, previous: bool) -> Path:
        """
        Raises:
            StatusError: the kubelet can't be reached.
        """
        if not self.up.is_set():
            metadata = pod["metadata"]
            message = (
                f'Get "https://127.0.0.1:10250/containerLogs/{metadata["namespace"]}/{metadata["name"]}/{name}": '
                "dial tcp 127.0.0.1:10250: connect: connection refused"
            )
            raise StatusError(500, "InternalError", message)
        worker = self._workers.get(pod["metadata"]["uid"])
        return worker.log_path(name, previous=previous) if worker else Path("/dev/null")

    def is_writing(self, pod: Object, name: str) -> bool:
        worker = self._workers.get(pod["metadata"]["uid"])
        return worker is not None and self.up.is_set() and worker.is_writing(name)

    def names_changed(self, namespace: str, lines: list[str]) -> None:
        for worker in self._workers.values():
            if worker.key[0] == namespace and worker.address:
                worker.names_changed(lines)

    async def close(self) -> None:
        for worker in self._workers.values():
            await worker.close()
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)

    # -- pods --

    def _pod_changed(self, change: Change) -> None:
        if change.record.object["spec"].get("nodeName") != self.name or not self.up.is_set():
            return
        if change.kind == "DELETED":
            self._remove(change.record.object["metadata"]["uid"])
        else:
            self._follow(change.record.object)

    def _follow(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        worker = self._workers.get(uid)
        if worker is not None:
            worker.changed(pod)
        elif pod["status"].get("phase") not in ("Succeeded", "Failed"):
            worker = self._workers[uid] = PodWorker(self, pod)
            if is_deleting(pod):
                worker.changed(pod)

    def _remove(self, uid: str) -> None:
        worker = self._workers.pop(uid, None)
        if worker is None:
            return

        async def end() -> None:
            worker.removed()
            assert worker.end is not None
            await asyncio.wait([worker.end])
            await worker.forget()

        task = asyncio.create_task(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    # -- the node --

    def _beat(self) -> None:
        spec = {"holderIdentity": self.name, "leaseDurationSeconds": 40, "renewTime": micro_timestamp()}
        if self.cluster.operations.modify(LEASES, (LEASE_NAMESPACE, self.name), lambda each: each.update(spec=spec)):
            return
        self.cluster.operations.create(LEASES, LEASE_NAMESPACE, {"metadata": {"name": self.name}, "spec": spec})

    def _report(self) -> None:
        def report(node: Object) -> None:
            conditions = node["status"].setdefault("conditions", [])
            for kind, (status, reason, message) in _WELL.items():
                if kind == "DiskPressure" and self.disk_full:
                    status, reason, message = "True", "KubeletHasDiskPressure", "kubelet has disk pressure"
                set_condition(conditions, kind, status, reason=reason, message=message)
            for condition in conditions:
                condition["lastHeartbeatTime"] = timestamp()

        self.cluster.operations.modify(NODES, ("", self.name), report)
