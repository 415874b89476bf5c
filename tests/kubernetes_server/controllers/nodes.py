"""The node lifecycle: a node whose lease is not renewed is lost, and its pods are evicted after a while."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kubernetes_server.deletion import DeleteOptions
from kubernetes_server.objects import (
    Object,
    age_s,
    has_condition,
    is_deleting,
    key_of,
    micro_timestamp,
    set_condition,
    timestamp,
)
from kubernetes_server.resources import LEASES, NODES, PODS
from kubernetes_server.scheduling.taints import is_tolerated, toleration_of
from kubernetes_server.statuses import StatusError

if TYPE_CHECKING:
    from kubernetes_server.cluster import Cluster

LEASE_NAMESPACE = "kube-node-lease"
UNREACHABLE = "node.kubernetes.io/unreachable"
_CONDITIONS = ("MemoryPressure", "DiskPressure", "PIDPressure", "Ready")


class NodeController:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._operations = cluster.operations
        self._store = cluster.store
        self._lost_since: dict[str, float] = {}

    async def run(self) -> None:
        """Look at all nodes every few moments: what counts is time, not changes."""
        while True:
            await asyncio.sleep(min(self._cluster.settings.timing.node_heartbeat_s, 0.2))
            nodes = self._store.objects(NODES.store_key)
            for node in nodes:
                self._check(node)
            for node in self._store.objects(NODES.store_key):
                self._evict(node)

    def _check(self, node: Object) -> None:
        name = node["metadata"]["name"]
        lease = self._store.get(LEASES.store_key, (LEASE_NAMESPACE, name))
        renewed = (lease or {}).get("spec", {}).get("renewTime") or node["metadata"]["creationTimestamp"]
        timing = self._cluster.settings.timing
        kubelet = self._cluster.kubelets.get(name)
        # The heartbeats of a kubelet that works may be late on a busy machine.
        lost = age_s(renewed) > timing.node_grace_s and not (kubelet and kubelet.up.is_set())
        if not lost:
            self._lost_since.pop(name, None)
            if has_condition(node, "Ready"):
                self._taint(name, UNREACHABLE, "")
            return
        if name not in self._lost_since:
            self._lost_since[name] = self._cluster.time()
            self._mark_pods(name)
            self._mark(name)
            self._cluster.events.record(
                node, "NodeNotReady", f"Node {name} status is now: NodeNotReady", component="node-controller"
            )
        effects = "NoSchedule"
        others = [each["metadata"]["name"] for each in self._store.objects(NODES.store_key)]
        # With all nodes lost it is rather the network: nothing is evicted then.
        some_live = any(each not in self._lost_since for each in others)
        if some_live and self._cluster.time() - self._lost_since[name] > timing.node_evict_s:
            effects = "NoSchedule,NoExecute"
        self._taint(name, UNREACHABLE, effects)

    def _mark(self, name: str) -> None:
        def mark(node: Object) -> None:
            for kind in _CONDITIONS:
                set_condition(
                    node["status"].setdefault("conditions", []),
                    kind,
                    "Unknown",
                    reason="NodeStatusUnknown",
                    message="Kubelet stopped posting node status.",
                )

        self._operations.modify(NODES, ("", name), mark)

    def _mark_pods(self, node_name: str) -> None:
        def mark(pod: Object) -> None:
            for condition in pod["status"].get("conditions") or ():
                if condition["type"] == "Ready" and condition["status"] != "False":
                    condition.update(status="False", lastTransitionTime=timestamp())

        for pod in self._pods(node_name):
            if has_condition(pod, "Ready"):
                self._operations.modify(PODS, key_of(pod), mark)
                self._cluster.events.record(
                    pod, "NodeNotReady", "Node is not ready", component="node-controller", warning=True
                )

    def _taint(self, name: str, key: str, effects: str) -> None:
        wanted = effects.split(",") if effects else []

        def taint(node: Object) -> None:
            taints = node["spec"].get("taints") or []
            kept = [each for each in taints if each["key"] != key or each["effect"] in wanted]
            present = {each["effect"] for each in kept if each["key"] == key}
            kept += [
                {"key": key, "effect": effect, "timeAdded": timestamp()} for effect in wanted if effect not in present
            ]
            if kept:
                node["spec"]["taints"] = kept
            else:
                node["spec"].pop("taints", None)

        self._operations.modify(NODES, ("", name), taint)

    def _evict(self, node: Object) -> None:
        taints = [each for each in node["spec"].get("taints") or () if each["effect"] == "NoExecute"]
        if not taints:
            return
        for pod in self._pods(node["metadata"]["name"]):
            if is_deleting(pod) or pod["status"].get("phase") in ("Succeeded", "Failed"):
                continue
            tolerations = pod["spec"].get("tolerations") or []
            for taint in taints:
                seconds = (toleration_of(tolerations, taint) or {}).get("tolerationSeconds")
                since_s = age_s(taint.get("timeAdded") or micro_timestamp())
                if not is_tolerated(tolerations, taint) or (seconds is not None and since_s >= seconds):
                    self._evict_pod(pod)
                    break

    def _evict_pod(self, pod: Object) -> None:
        namespace, name = key_of(pod)
        text = f"Marking for deletion Pod {namespace}/{name}"
        self._cluster.events.record(pod, "TaintManagerEviction", text, component="taint-eviction-controller")

        def mark(pod: Object) -> None:
            set_condition(
                pod["status"].setdefault("conditions", []),
                "DisruptionTarget",
                "True",
                reason="DeletionByTaintManager",
                message="Taint manager: deleting due to NoExecute taint",
            )

        self._operations.modify(PODS, (namespace, name), mark)
        try:
            self._operations.deletion.delete(PODS, (namespace, name), DeleteOptions())
        except StatusError:
            return

    def _pods(self, node_name: str) -> list[Object]:
        return [pod for pod in self._store.objects(PODS.store_key) if pod["spec"].get("nodeName") == node_name]
