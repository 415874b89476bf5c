"""The nodes of a Ray cluster, from three answers of its dashboard. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainmaster.backends.ray.render import ACCELERATOR, GPU_MEMORY_MB, REGION_LABEL
from trainmaster.server.core.resources import REGION, Gpu, Node

_OWN = ("CPU", "GPU", "memory", "object_store_memory")
_OWN_PREFIXES = ("node:", ACCELERATOR)
_NODE_LABEL = "ray.io/node-id"


def nodes_from(
    backend: str,
    states: Sequence[Mapping[str, Any]],
    summary: Sequence[Mapping[str, Any]] = (),
    usage: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
) -> list[Node]:
    """Those that are alive and have a CPU or a GPU for jobs.

    Args:
        states: The state API's `nodes`, with details.
        summary: `GET /nodes?view=summary`: what the machines say of themselves.
        usage: The autoscaler's `usageByNode`: used and total of each resource.
    """
    physical = {str((entry.get("raylet") or {}).get("nodeId", "")): entry for entry in summary}
    alive = [state for state in states if state["state"] == "ALIVE" and _is_for_jobs(state["resources_total"])]
    names = [_name(state) for state in alive]
    return [
        _node(
            # Several may run on one machine.
            f"{backend}:{name}" if names.count(name) == 1 else f"{backend}:{name}-{state['node_id'][:6]}",
            backend,
            state,
            physical.get(state["node_id"], {}),
            (usage or {}).get(state["node_id"], {}),
        )
        for name, state in zip(names, alive, strict=True)
    ]


def _is_for_jobs(resources: Mapping[str, float]) -> bool:
    return resources.get("CPU", 0) >= 1 or resources.get("GPU", 0) >= 1


def _name(state: Mapping[str, Any]) -> str:
    return str(state.get("node_name") or state["node_ip"])


def _node(
    node_id: str,
    backend: str,
    state: Mapping[str, Any],
    physical: Mapping[str, Any],
    usage: Mapping[str, Sequence[float]],
) -> Node:
    resources, labels = state["resources_total"], state.get("labels") or {}
    known = [f"{key}={value}" for key, value in labels.items() if key != _NODE_LABEL]
    if region := labels.get(REGION_LABEL):
        known.append(f"{REGION}{region}")
    custom = (name for name in resources if name not in _OWN and not name.startswith(_OWN_PREFIXES))
    disks = [disk for disk in (physical.get("disk") or {}).values() if isinstance(disk, Mapping)]
    return Node(
        node_id=node_id,
        backend=backend,
        hostname=str(physical.get("hostname") or _name(state)),
        address=str(state["node_ip"]),
        cpu_cores=int(resources.get("CPU", 0)),
        ram_mb=int(resources.get("memory", 0)) >> 20,
        storage_mb=max((int(disk.get("free", 0)) >> 20 for disk in disks), default=0),
        gpus=tuple(_gpus(resources, physical)),
        labels=tuple(sorted(known)),
        capabilities=tuple(sorted({*custom, *known})),
        slots=max(1, int(resources.get("CPU", 0))),
        held_gpus=_held(usage, "GPU"),
        held_cpu_cores=_held(usage, "CPU"),
        held_ram_mb=_held(usage, "memory") >> 20,
    )


def _held(usage: Mapping[str, Sequence[float]], resource: str) -> int:
    """Whole ones: a part of a GPU leaves nothing for a job that asks for a GPU."""
    return math.ceil(float((usage.get(resource) or (0,))[0]))


def _gpus(resources: Mapping[str, float], physical: Mapping[str, Any]) -> Iterator[Gpu]:
    kind = next((name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR)), "")
    seen = [gpu for gpu in physical.get("gpus") or [] if isinstance(gpu, Mapping)]
    for index in range(int(resources.get("GPU", 0))):
        own = seen[index] if index < len(seen) else {}
        memory_mb = int(own.get("memoryTotal") or 0)
        yield Gpu(
            index=index,
            device=str(index),
            type=f"{kind}-{_gigabytes(memory_mb)}GB" if kind and memory_mb else kind or str(own.get("name") or "GPU"),
            memory_mb=memory_mb or GPU_MEMORY_MB.get(kind, 0),
            used_mb=int(own["memoryUsed"]) if own.get("memoryUsed") is not None else None,
        )


def _gigabytes(memory_mb: int) -> int:
    """As it is sold: a card of 80 GB reports a little more or less.

    >>> [_gigabytes(size) for size in (81559, 40960, 143771, 24564, 15360)]
    [80, 40, 141, 24, 16]
    """
    sizes = sorted({size >> 10 for size in GPU_MEMORY_MB.values()})
    return min(sizes, key=lambda size: abs(size - memory_mb / 1024))
