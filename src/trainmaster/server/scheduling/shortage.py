"""What a job asks for, what of it is missing, and which node lacks the least: in words and in numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainmaster.server.core.resources import Free, Gpu, Needs, Node, NodeState, Share, whole
from trainmaster.server.scheduling.placement import good_enough, inventory_from_nodes
from trainmaster.server.scheduling.pool import Demand, Pool
from trainmaster.server.scheduling.view import ClusterView

NAMED = 5
"""How many nodes, types or tags a sentence names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestNode:
    """The node that lacks the least of what a job needs."""

    node_id: str
    gpus_free: int
    """Of those that are good enough for the job."""
    cpu_cores_free: int
    ram_mb_free: int
    storage_mb_free: int
    slots_free: int


def needs_in_words(needs: Needs, gpus: int) -> str:
    """What a job asks for, such as `8 × H100 on one node`; `gpus` are those of each node."""
    parts = []
    if gpus:
        of_memory = f" with {needs.gpu_memory_min_mb} MB" if needs.gpu_memory_min_mb else ""
        parts.append(f"{gpus} × {needs.gpu_type or 'GPU'}{of_memory}")
    parts += [f"{wanted} {unit}" for wanted, unit in _plain(needs) if wanted]
    if needs.capabilities:
        parts.append(f"the capabilities {', '.join(needs.capabilities)}")
    what = ", ".join(parts) or "a slot"
    return f"{what} on one node" if needs.node_count == 1 else f"{what} on each of {needs.node_count} nodes"


def best_node(demand: Demand, pool: Pool) -> BestNode | None:
    """Where the least is missing, among the nodes that could hold a node of the gang; None when there are none."""
    wanted = (1, *(amount for amount, _ in _plain(demand.needs)))
    best: tuple[int, int, int, str, int] | None = None
    for kind, matching in demand.kinds:
        good = frozenset(matching)
        for node_id in pool.nodes_of(kind):
            left = pool.left(node_id)
            gpus = len(good & left.gpus)
            lacking = sum(least > have for least, have in zip(wanted, _left(left), strict=True))
            score = (max(0, demand.gpus - gpus), lacking, -left.cpu_cores, node_id, gpus)
            best = score if best is None else min(best, score)
    if best is None:
        return None
    left = pool.left(best[3])
    return BestNode(
        node_id=best[3],
        gpus_free=best[4],
        cpu_cores_free=left.cpu_cores,
        ram_mb_free=left.ram_mb,
        storage_mb_free=left.storage_mb,
        slots_free=left.slots,
    )


def free_in_words(demand: Demand, pool: Pool, best: BestNode) -> str:
    """What the best node has of the things that it has too little of; of a gang, how much of it fits."""
    if demand.count > 1:
        return f"{_members(demand.backend, demand.needs, pool)} of its {demand.count} nodes would fit now"
    have = (best.slots_free, best.cpu_cores_free, best.ram_mb_free, best.storage_mb_free)
    wanted = [(1, "slots"), *_plain(demand.needs)]
    short = [f"{left} {unit}" for left, (least, unit) in zip(have, wanted, strict=True) if left < least]
    if best.gpus_free < demand.gpus:
        short.insert(0, f"{best.gpus_free} GPUs" if short else str(best.gpus_free))
    return f"the best node has {' and '.join(short)} free"


def why_never(needs: Needs, nodes: Sequence[Node], backend: str) -> tuple[str, str]:
    """Why no node could ever run a job, by what is nearest to it; and what would change that."""
    if not nodes:
        return f"backend {backend!r} has no nodes", f"a node of backend {backend!r} came up"
    tags = frozenset().union(*(node.tags for node in nodes))
    if missing := ", ".join(sorted(set(needs.capabilities) - tags)):
        why = f"no node has the capability {missing}; there are: {_some(sorted(tags)) or 'none'}"
        return why, f"a node were given the capability {missing}"
    gpus = inventory_from_nodes(nodes).gpus_wanted(needs, backend)
    types = sorted({gpu.type for node in nodes for gpu in node.gpus})
    if gpus and not types:
        return "no node has a GPU", "it asked for no GPU"
    if gpus and needs.gpu_type and not any(_matching(replace(needs, gpu_memory_min_mb=0), node) for node in nodes):
        return f"no node has a GPU of type {needs.gpu_type}; there are: {_some(types)}", "it asked for one of those"
    if (largest := _largest(needs, nodes, gpus)) is not None:
        return largest
    if most := _members(backend, needs, Pool(ClusterView().with_nodes(nodes))):
        return f"at most {most} of its {needs.node_count} nodes fit at once", f"it asked for at most {most} nodes"
    return "no node has all of that at once", "it asked for less of it"


def nodes_away(needs: Needs, nodes: Sequence[Node], backend: str) -> tuple[str, str] | None:
    """Which nodes that accept no jobs, or unschedulable GPUs, a job waits for; None when those would not help."""
    if (shares := _find(backend, needs, restored_pool(nodes))) is None:
        return None
    used = {share.node_id for share in shares}
    able = _able(needs, nodes, backend) if any(node.pool in used for node in nodes) else set()
    chosen = [node for node in nodes if node.node_id in used or (node.pool in used and node.node_id in able)]
    if away := [node for node in chosen if node.state is not NodeState.READY]:
        told = _some([f"{node.node_id} ({': '.join(filter(None, (node.state, node.drain_reason)))})" for node in away])
        names = _some([node.node_id for node in away])
        again = "came back" if all(node.state is NodeState.OFFLINE for node in away) else "were enabled"
        return f"nodes that could run it take no work: {told}", f"{names} {again}"
    wanted = {(share.node_id, index) for share in shares for index in share.gpus}
    broken = [
        f"GPU {gpu.index} of {node.node_id} ({gpu.problem or 'unhealthy'})"
        for node in chosen
        for gpu in node.gpus
        if not gpu.healthy and (node.pool in used or (node.node_id, gpu.index) in wanted)
    ]
    return f"GPUs that it needs are not schedulable: {_some(broken)}", "they were healthy again"


def restored_pool(nodes: Sequence[Node]) -> Pool:
    """The nodes as they would be if all were empty and ready, with healthy GPUs: what can ever be had of them."""
    restored = (
        replace(node, state=NodeState.READY, gpus=tuple(replace(gpu, healthy=True) for gpu in node.gpus))
        for node in nodes
    )
    return Pool(ClusterView().with_nodes(restored))


def _able(needs: Needs, nodes: Sequence[Node], backend: str) -> set[str]:
    """The nodes that could ever hold a node of a gang, whatever pools they are in."""
    pool = restored_pool([replace(node, pool="") for node in nodes])
    return {node_id for kind, _ in pool.demand(backend, needs).kinds for node_id in pool.nodes_of(kind)}


def _largest(needs: Needs, nodes: Sequence[Node], gpus: int) -> tuple[str, str] | None:
    """The one thing that no node has enough of."""
    if gpus:
        of_type = replace(needs, gpu_memory_min_mb=0)
        largest = max((gpu.memory_mb for node in nodes for gpu in _matching(of_type, node)), default=0)
        if largest < needs.gpu_memory_min_mb:
            return f"the largest GPU has {largest} MB", f"it asked for at most {largest} MB of GPU memory"
        most = max(len(_matching(needs, node)) for node in nodes)
        if most < gpus:
            name = needs.gpu_type or "GPU"
            return f"no node has {gpus} × {name}; the largest has {most}", f"it asked for at most {most} on each node"
    for index, (wanted, unit) in enumerate(_plain(needs), start=1):
        most = max(_left(whole(node))[index] for node in nodes)
        if wanted > most:
            return f"no node has {wanted} {unit}; the largest has {most}", f"it asked for at most {most} {unit}"
    return None


def _matching(needs: Needs, node: Node) -> list[Gpu]:
    return [gpu for gpu in node.gpus if gpu.healthy and good_enough(needs, gpu.type, gpu.memory_mb)]


def _members(backend: str, needs: Needs, pool: Pool) -> int:
    """How many nodes of a gang that does not fit as a whole would fit."""

    def too_many(count: int) -> bool:
        return _find(backend, replace(needs, node_count=count), pool) is None

    return bisect_left(range(1, needs.node_count), True, key=too_many)


def _find(backend: str, needs: Needs, pool: Pool) -> list[Share] | None:
    return pool.find(pool.demand(backend, needs))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _left(free: Free) -> tuple[int, int, int, int]:
    return free.slots, free.cpu_cores, free.ram_mb, free.storage_mb


def _plain(needs: Needs) -> list[tuple[int, str]]:
    return [(needs.cpu_cores, "cores"), (needs.ram_mb, "MB of memory"), (needs.storage_mb, "MB of disk")]
