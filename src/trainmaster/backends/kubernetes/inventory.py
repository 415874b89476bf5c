"""The nodes of a Kubernetes cluster, as jobs see them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainmaster.backends.kubernetes.gpus import gpus_of
from trainmaster.backends.kubernetes.manifests import REGION_LABEL
from trainmaster.backends.kubernetes.options import KubernetesOptions
from trainmaster.backends.kubernetes.views import Amounts, NodeView, Taint
from trainmaster.server.core.resources import REGION, Gpu, Node, NodeState, quantity

_CONTROL = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
_CONDITIONS = "node.kubernetes.io/"
"""Taints that say what state a node is in."""
_KEEPING_OFF = ("NoSchedule", "NoExecute")


def nodes_from(
    backend: str, views: Iterable[NodeView], held: Mapping[str, Sequence[Amounts]], options: KubernetesOptions
) -> list[Node]:
    """Those that the jobs of a cluster may run on; `held`: what pods take, by the name of the node."""
    return [
        _node(backend, view, held.get(view.name, ()), options)
        for view in sorted(views, key=lambda view: view.name)
        if _is_for_jobs(view, options)
    ]


def _is_for_jobs(view: NodeView, options: KubernetesOptions) -> bool:
    if any(view.labels.get(key) != value for key, value in options.node_selector.items()):
        return False
    return not any(taint.key in _CONTROL for taint in _keeping_off(view, options))


def _keeping_off(view: NodeView, options: KubernetesOptions) -> list[Taint]:
    return [
        taint
        for taint in view.taints
        if taint.effect in _KEEPING_OFF and not any(tolerates(each, taint) for each in options.tolerations)
    ]


def tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    """Whether a pod with a toleration may run in spite of a taint.

    >>> tolerates({"key": "a", "operator": "Exists"}, Taint(key="a", value="b", effect="NoSchedule"))
    True
    """
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    if toleration["key"] != taint.key:
        return False
    return toleration.get("operator") == "Exists" or (toleration.get("value") or "") == taint.value


def _node(backend: str, view: NodeView, held: Sequence[Amounts], options: KubernetesOptions) -> Node:
    state, why = _state(view, bool(held), options)
    marks = _marks(view.labels)
    return Node(
        node_id=f"{backend}:{view.name}",
        backend=backend,
        hostname=view.name,
        address=view.address,
        cpu_cores=int(view.cpu),
        ram_mb=int(view.memory) >> 20,
        storage_mb=int(view.storage) >> 20,
        gpus=gpus_of(view.labels, view.gpus, options),
        labels=marks,
        capabilities=marks,
        slots=max(1, view.pods),
        state=state,
        drain_reason=why,
        held_gpus=sum(each.gpus for each in held),
        held_cpu_cores=math.ceil(sum(each.cpu for each in held)),
        held_ram_mb=math.ceil(sum(each.memory for each in held) / (1 << 20)),
    )


def _state(view: NodeView, is_busy: bool, options: KubernetesOptions) -> tuple[NodeState, str]:
    if not view.is_ready:
        return NodeState.OFFLINE, view.why_not
    taints = [taint for taint in _keeping_off(view, options) if not taint.key.startswith(_CONDITIONS)]
    conditions = [taint for taint in _keeping_off(view, options) if taint.key.startswith(_CONDITIONS)]
    if not (view.is_cordoned or taints or conditions):
        return NodeState.READY, ""
    closed = NodeState.DRAINING if is_busy else NodeState.DRAINED
    if taints:
        first = taints[0]
        what = f"{first.key}={first.value}" if first.value else first.key
        return closed, f"it has the taint {what}:{first.effect}, which the option tolerations does not name"
    words = [taint.key.removeprefix(_CONDITIONS) for taint in conditions] or ["unschedulable"]
    return closed, f"it is {' and '.join(words)}"


def _marks(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Labels as `key=value`, and those that are only there by their keys; `manifests.node_label` reads both."""
    marks = {f"{key}={value}" for key, value in labels.items() if value}
    marks |= {key for key, value in labels.items() if value in ("", "true")}
    if region := labels.get(REGION_LABEL):
        marks.add(f"{REGION}{region}")
    return tuple(sorted(marks))


def assumed_nodes(backend: str, options: KubernetesOptions) -> list[Node]:
    """What stands for nodes that the server may not list: Kubernetes has the last word."""
    given = options.assumed_node

    def amount(name: str) -> int:
        return int(quantity(given.get(name, "0")))

    kind, memory_mb = given.get("gpu_type", ""), options.gpu_memory_mb
    return [
        Node(
            node_id=f"{backend}:assumed-{number}",
            backend=backend,
            hostname=f"assumed-{number}",
            cpu_cores=amount("cpu"),
            ram_mb=amount("memory") >> 20,
            storage_mb=amount("storage") >> 20,
            gpus=tuple(
                Gpu(index=index, device=str(index), type=kind, memory_mb=memory_mb) for index in range(amount("gpus"))
            ),
            slots=110,
        )
        for number in range(max(1, amount("count")))
    ]
