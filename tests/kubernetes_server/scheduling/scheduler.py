"""The scheduler: one pod after the other, by priority; it preempts pods of lower priority."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from decimal import Decimal
from typing import TYPE_CHECKING

from kubernetes_server.deletion import DeleteOptions
from kubernetes_server.objects import Key, Object, is_deleting, key_of, set_condition, timestamp
from kubernetes_server.resources import NODES, PODS
from kubernetes_server.scheduling.needs import NodeRoom, lacks, refusals, requests_of, room_of, signature
from kubernetes_server.statuses import StatusError
from kubernetes_server.store import Change

if TYPE_CHECKING:
    from kubernetes_server.cluster import Cluster

log = logging.getLogger(__name__)
_NAME = "default-scheduler"


class Scheduler:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._operations = cluster.operations
        self._rooms: dict[str, NodeRoom] = {}
        self._waiting: dict[Key, Object] = {}
        self._nominated: dict[Key, Object] = {}
        """Those that wait for their victims to go."""
        self._wake = asyncio.Event()
        self._retry = False
        """Whether something changed that may let a pod fit that did not."""
        self._refused: dict[Key, str] = {}
        """What was last said about a pod that waits."""
        cluster.store.subscribe(NODES.store_key, self._node_changed)
        cluster.store.subscribe(PODS.store_key, self._pod_changed)

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._pass()
            except Exception:
                log.exception("the scheduler")
            # What happens in a moment is answered by one pass.
            await asyncio.sleep(0.01)

    def bind(self, key: Key, node_name: str) -> None:
        """Put a pod on a node."""

        def bind(pod: Object) -> None:
            pod["spec"]["nodeName"] = node_name
            pod["status"].pop("nominatedNodeName", None)
            set_condition(pod["status"].setdefault("conditions", []), "PodScheduled", "True")

        pod = self._operations.modify(PODS, key, bind)
        if pod is not None:
            text = f"Successfully assigned {key[0]}/{key[1]} to {node_name}"
            self._cluster.events.record(pod, "Scheduled", text, component=_NAME)

    # -- what is where --

    def _node_changed(self, change: Change) -> None:
        name = change.record.key[1]
        old = self._rooms.pop(name, None)
        if change.kind != "DELETED":
            room = self._rooms[name] = room_of(change.record.object)
            for pod, needs in old.pods.values() if old else ():
                room.add(pod, needs)
        before = change.previous.object if change.previous else {"spec": {}, "status": {}}
        after = change.record.object
        allocatable = [(each.get("status") or {}).get("allocatable") for each in (before, after)]
        labels = [each.get("metadata", {}).get("labels") for each in (before, after)]
        if before["spec"] != after["spec"] or allocatable[0] != allocatable[1] or labels[0] != labels[1]:
            self._look_again()

    def _pod_changed(self, change: Change) -> None:
        pod, key = change.record.object, change.record.key
        node_name = pod["spec"].get("nodeName")
        if pod["status"].get("nominatedNodeName") and change.kind != "DELETED":
            self._nominated[key] = pod
        else:
            self._nominated.pop(key, None)
        ended = change.kind == "DELETED" or pod["status"].get("phase") in ("Succeeded", "Failed")
        if node_name:
            self._waiting.pop(key, None)
            self._refused.pop(key, None)
            room = self._rooms.get(node_name)
            if room is None:
                return
            uid = pod["metadata"]["uid"]
            if ended:
                if room.discard(uid):
                    self._look_again()
            elif uid in room.pods:
                room.pods[uid] = (pod, room.pods[uid][1])
            else:
                room.add(pod, requests_of(pod))
        elif ended or is_deleting(pod) or pod["spec"].get("schedulingGates"):
            self._waiting.pop(key, None)
            self._refused.pop(key, None)
        elif pod["spec"].get("schedulerName") == _NAME:
            self._waiting[key] = pod
            if key not in self._refused:
                self._wake.set()

    def _look_again(self) -> None:
        self._retry = True
        if self._waiting:
            self._wake.set()

    # -- a pass --

    async def _pass(self) -> None:
        everything, self._retry = self._retry, False
        pods = [pod for key, pod in self._waiting.items() if everything or key not in self._refused]
        pods.sort(key=lambda pod: (-pod["spec"].get("priority", 0), pod["metadata"]["creationTimestamp"]))
        hopeless: dict[str, str] = {}
        for i, pod in enumerate(pods):
            key = key_of(pod)
            current = self._waiting.get(key)
            if current is None:
                continue
            mark = signature(current)
            if mark in hopeless:
                self._refuse(key, current, hopeless[mark])
            elif (message := self._place(key, current)) is not None:
                hopeless[mark] = message
                self._refuse(key, current, message)
            if i % 100 == 99:
                await asyncio.sleep(0)

    def _place(self, key: Key, pod: Object) -> str | None:
        """Bind a pod, or say why it can't be."""
        needs = requests_of(pod)
        reasons: Counter[str] = Counter()
        candidates: list[NodeRoom] = []
        fitting: list[NodeRoom] = []
        reserved = self._reserved(pod)
        for name, room in self._rooms.items():
            found, movable = refusals(pod, needs, _with(room, reserved.get(name, ())))
            if not found:
                fitting.append(room)
                continue
            reasons.update(found)
            if movable:
                candidates.append(room)
        if fitting:
            best = min(fitting, key=lambda room: (_share(room), len(room.pods)))
            self.bind(key, best.node["metadata"]["name"])
            return None
        total = len(self._rooms)
        if not total:
            return "no nodes available to schedule pods"
        listed = ", ".join(sorted(f"{count} {reason}" for reason, count in reasons.items()))
        text = f"0/{total} nodes are available: {listed}."
        return f"{text}{self._preempt(key, pod, needs, candidates)}"

    def _reserved(self, pod: Object) -> dict[str, list[Object]]:
        """Pods of at least this priority that were promised the place of their victims, by node."""
        found: dict[str, list[Object]] = {}
        for key, other in self._nominated.items():
            if key not in self._waiting:
                continue
            node_name = other["status"]["nominatedNodeName"]
            own = other["metadata"]["uid"] == pod["metadata"]["uid"]
            if not own and other["spec"]["priority"] >= pod["spec"]["priority"]:
                found.setdefault(node_name, []).append(other)
        return found

    def _refuse(self, key: Key, pod: Object, message: str) -> None:
        def refuse(pod: Object) -> None:
            conditions = pod["status"].setdefault("conditions", [])
            set_condition(conditions, "PodScheduled", "False", reason="Unschedulable", message=message)

        changed = self._refused.get(key) != message
        self._refused[key] = message
        if changed:
            self._operations.modify(PODS, key, refuse)
            self._cluster.events.record(pod, "FailedScheduling", message, component=_NAME, warning=True)

    # -- preemption --

    def _preempt(self, key: Key, pod: Object, needs: dict[str, Decimal], candidates: list[NodeRoom]) -> str:
        """Delete the pods that a pod replaces; what to say about it."""
        if pod["spec"].get("preemptionPolicy") == "Never":
            return " preemption: not eligible due to preemptionPolicy=Never."
        priority = pod["spec"]["priority"]
        nominated = self._rooms.get(pod["status"].get("nominatedNodeName", ""))
        if nominated and any(
            is_deleting(each) and each["spec"].get("priority", 0) < priority for each, _ in nominated.pods.values()
        ):
            return " preemption: not eligible due to a terminating pod on the nominated node."
        options = [(victims, room) for room in candidates if (victims := _victims(needs, room, priority)) is not None]
        total = len(self._rooms)
        if not options:
            parts = []
            if candidates:
                parts.append(f"{len(candidates)} No preemption victims found for incoming pod")
            if total > len(candidates):
                parts.append(f"{total - len(candidates)} Preemption is not helpful for scheduling")
            return f" preemption: 0/{total} nodes are available: {', '.join(parts)}."
        victims, room = min(
            options,
            key=lambda option: (
                max((each["spec"].get("priority", 0) for each in option[0]), default=0),
                len(option[0]),
            ),
        )
        node_name = room.node["metadata"]["name"]
        for victim in victims:
            self._remove(victim, pod, node_name)

        def nominate(pod: Object) -> None:
            pod["status"]["nominatedNodeName"] = node_name

        self._operations.modify(PODS, key, nominate)
        return ""

    def _remove(self, victim: Object, pod: Object, node_name: str) -> None:
        def mark(pod: Object) -> None:
            set_condition(
                pod["status"].setdefault("conditions", []),
                "DisruptionTarget",
                "True",
                reason="PreemptionByScheduler",
                message=f"{_NAME}: preempting to accommodate a higher priority pod",
            )

        if is_deleting(victim):
            return
        self._operations.modify(PODS, key_of(victim), mark)
        text = f"Preempted by pod {pod['metadata']['uid']} on node {node_name}"
        self._cluster.events.record(victim, "Preempted", text, component=_NAME)
        try:
            self._operations.deletion.delete(PODS, key_of(victim), DeleteOptions())
        except StatusError:
            return


def _with(room: NodeRoom, others: list[Object] | tuple[()]) -> NodeRoom:
    """A node as it is once pods that are promised a place are on it."""
    if not others:
        return room
    fuller = NodeRoom(node=room.node, allocatable=room.allocatable, pods=dict(room.pods), used=dict(room.used))
    for other in others:
        fuller.add(other, requests_of(other))
    return fuller


def _share(room: NodeRoom) -> Decimal:
    """How full a node is of what it has least of."""
    shares = [room.used.get(name, Decimal(0)) / total for name, total in room.allocatable.items() if total]
    return max(shares, default=Decimal(0))


def _victims(needs: dict[str, Decimal], room: NodeRoom, priority: int) -> list[Object] | None:
    """The pods that must go for a pod of this priority, or None if that does not help."""
    lower = [each for each, _ in room.pods.values() if each["spec"].get("priority", 0) < priority]
    if not lower:
        return None
    emptied = NodeRoom(node=room.node, allocatable=room.allocatable, pods=dict(room.pods), used=dict(room.used))
    for pod in lower:
        emptied.discard(pod["metadata"]["uid"])
    if lacks(needs, emptied):
        return None
    victims = []
    # The most important ones may stay if there is room left.
    for pod in sorted(lower, key=lambda each: (-each["spec"].get("priority", 0), _started(each))):
        uid = pod["metadata"]["uid"]
        emptied.add(pod, room.pods[uid][1])
        if lacks(needs, emptied):
            emptied.discard(uid)
            victims.append(pod)
    return victims


def _started(pod: Object) -> str:
    return str(pod["status"].get("startTime") or timestamp())
