"""What pods need, and why a node does not do for a pod."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from decimal import Decimal

from kubernetes_server.objects import Object, labels_of
from kubernetes_server.quantities import quantity
from kubernetes_server.scheduling.taints import is_tolerated
from kubernetes_server.selectors import matches_expression

AFFINITY = "node(s) didn't match Pod's node affinity/selector"
UNSCHEDULABLE = "node(s) were unschedulable"
TOO_MANY = "Too many pods"
_UNSCHEDULABLE_TAINT = {"key": "node.kubernetes.io/unschedulable", "value": "", "effect": "NoSchedule"}


def requests_of(pod: Object) -> dict[str, Decimal]:
    """The sum over the containers, or what an init container needs if that is more."""
    found: dict[str, Decimal] = {}
    spec = pod["spec"]
    for container in spec["containers"]:
        for name, value in ((container.get("resources") or {}).get("requests") or {}).items():
            found[name] = found.get(name, Decimal(0)) + quantity(value)
    for container in spec.get("initContainers") or ():
        for name, value in ((container.get("resources") or {}).get("requests") or {}).items():
            found[name] = max(found.get(name, Decimal(0)), quantity(value))
    return {name: value for name, value in found.items() if value}


def signature(pod: Object) -> str:
    """Equal for pods that the same nodes do for."""
    spec = pod["spec"]
    parts = [
        sorted((name, str(value)) for name, value in requests_of(pod).items()),
        [spec.get(name) for name in ("nodeSelector", "affinity", "tolerations", "priority", "preemptionPolicy")],
    ]
    return json.dumps(parts, sort_keys=True)


@dataclass(kw_only=True)
class NodeRoom:
    """What a node has, and the pods on it."""

    node: Object
    allocatable: dict[str, Decimal]
    pods: dict[str, tuple[Object, dict[str, Decimal]]] = field(default_factory=dict)
    """Pods by uid, with what they need."""
    used: dict[str, Decimal] = field(default_factory=dict)

    def add(self, pod: Object, needs: dict[str, Decimal]) -> None:
        self.pods[pod["metadata"]["uid"]] = (pod, needs)
        for name, value in needs.items():
            self.used[name] = self.used.get(name, Decimal(0)) + value

    def discard(self, uid: str) -> bool:
        found = self.pods.pop(uid, None)
        if found is None:
            return False
        for name, value in found[1].items():
            self.used[name] -= value
        return True


def room_of(node: Object) -> NodeRoom:
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    return NodeRoom(node=node, allocatable={name: quantity(value) for name, value in allocatable.items()})


def refusals(pod: Object, needs: dict[str, Decimal], room: NodeRoom) -> tuple[list[str], bool]:
    """Why a node does not do for a pod, and whether the node might if other pods left it."""
    fixed = _fixed_refusal(pod, room.node)
    if fixed:
        return [fixed], False
    return lacks(needs, room), True


def lacks(needs: dict[str, Decimal], room: NodeRoom) -> list[str]:
    found = []
    if len(room.pods) >= room.allocatable.get("pods", Decimal(110)):
        found.append(TOO_MANY)
    for name, value in needs.items():
        if value > room.allocatable.get(name, Decimal(0)) - room.used.get(name, Decimal(0)):
            found.append(f"Insufficient {name}")
    return found


def _fixed_refusal(pod: Object, node: Object) -> str:
    spec = pod["spec"]
    tolerations = spec.get("tolerations") or []
    if node["spec"].get("unschedulable") and not is_tolerated(tolerations, _UNSCHEDULABLE_TAINT):
        return UNSCHEDULABLE
    for taint in node["spec"].get("taints") or ():
        if taint["effect"] != "PreferNoSchedule" and not is_tolerated(tolerations, taint):
            return f"node(s) had untolerated taint {{{taint['key']}: {taint.get('value', '')}}}"
    labels = labels_of(node)
    if any(labels.get(name) != value for name, value in (spec.get("nodeSelector") or {}).items()):
        return AFFINITY
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if required and not any(_matches_term(term, node) for term in required["nodeSelectorTerms"]):
        return AFFINITY
    return ""


def _matches_term(term: Object, node: Object) -> bool:
    expressions = term.get("matchExpressions") or []
    fields = term.get("matchFields") or []
    if not expressions and not fields:
        return False
    name = {"metadata.name": node["metadata"]["name"]}
    return all(
        matches_expression(labels_of(node), each["key"], each["operator"], each.get("values") or [])
        for each in expressions
    ) and all(matches_expression(name, each["key"], each["operator"], each.get("values") or []) for each in fields)
