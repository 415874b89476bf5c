"""The rules of placement for a few nodes, as plainly as they can be written: what the scheduler's index must find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainmaster.server.core.resources import Free, Needs, Node, NodeState, Share
from trainmaster.server.scheduling.placement import good_enough, is_slice, preference, share_of


def fit(needs: Needs, nodes: Sequence[Node], free: Mapping[str, Free]) -> list[Share] | None:
    """A share for each node of the gang, or None when it does not fit into what is free."""
    left = dict(free)
    shares: list[Share] = []
    for _ in range(needs.node_count):
        chosen = _best(needs, nodes, left, shares)
        if chosen is None:
            return None
        node, share = chosen
        left[node.node_id] = left[node.node_id].without(share)
        shares.append(share)
    return shares


def usable(needs: Needs, node: Node) -> bool:
    """Whether the node takes work and has every tag that the job requires."""
    return node.state is NodeState.READY and node.tags.issuperset(needs.capabilities)


def gpus_wanted(needs: Needs, nodes: Sequence[Node]) -> int:
    """GPUs per node: the requested count; else one where the job describes a GPU or the backend has whole GPUs."""
    if needs.gpus_per_node is not None:
        return needs.gpus_per_node
    return int(needs.describes_gpu or any(not is_slice(gpu.type) for node in nodes for gpu in node.gpus))


def matching_gpus(needs: Needs, node: Node, free: Free) -> list[int]:
    """The free GPUs of a node that are good enough, smallest first."""
    good = [gpu for gpu in node.gpus if gpu.index in free.gpus and good_enough(needs, gpu.type, gpu.memory_mb)]
    good.sort(key=lambda gpu: (gpu.memory_mb, gpu.index))
    return [gpu.index for gpu in good]


def share_on(needs: Needs, node: Node, free: Free, gpus: int) -> Share | None:
    """What one node of the gang would take here; None when it does not fit."""
    if (
        free.slots < 1
        or free.cpu_cores < needs.cpu_cores
        or free.ram_mb < needs.ram_mb
        or free.storage_mb < needs.storage_mb
    ):
        return None
    matching = matching_gpus(needs, node, free) if gpus else []
    if len(matching) < gpus:
        return None
    return share_of(needs, node.node_id, matching[:gpus])


def _best(
    needs: Needs, nodes: Sequence[Node], left: Mapping[str, Free], taken: Sequence[Share]
) -> tuple[Node, Share] | None:
    gpus = gpus_wanted(needs, nodes)
    already = {share.node_id for share in taken}
    best: tuple[tuple[int, bool, int, int, str], Node, Share] | None = None
    for node in nodes:
        free = left[node.node_id]
        if not usable(needs, node):
            continue
        share = share_on(needs, node, free, gpus)
        if share is None:
            continue
        # Soft labels first, then a machine that the gang does not use yet, then the tightest fit.
        score = (
            preference(needs, node.marks),
            node.node_id in already,
            len(free.gpus),
            free.cpu_cores,
            node.node_id,
        )
        if best is None or score < best[0]:
            best = (score, node, share)
    return (best[1], best[2]) if best else None
