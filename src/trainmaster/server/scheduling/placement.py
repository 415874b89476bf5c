"""Whether and where a gang fits: all of its nodes or none.

The rules themselves, for a few nodes. `scheduling.pool` finds the same places among ten thousand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainmaster.server.core.resources import Free, Needs, Node, NodeState, Share, same_gpu_type


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


def is_slice(gpu_type: str) -> bool:
    """Whether it is a MIG slice, such as `mig-1g.5gb`, and not a whole GPU."""
    return same_gpu_type("mig", gpu_type)


def good_enough(needs: Needs, gpu_type: str, memory_mb: int) -> bool:
    """Whether a GPU is what a job asks for. A MIG slice is only for those that ask for one by name."""
    if memory_mb < needs.gpu_memory_min_mb:
        return False
    if needs.gpu_type is None:
        return not is_slice(gpu_type)
    return same_gpu_type(needs.gpu_type, gpu_type) and (is_slice(needs.gpu_type) or not is_slice(gpu_type))


def matching_gpus(needs: Needs, node: Node, free: Free) -> list[int]:
    """The free GPUs of a node that are good enough, smallest first."""
    good = [gpu for gpu in node.gpus if gpu.index in free.gpus and good_enough(needs, gpu.type, gpu.memory_mb)]
    good.sort(key=lambda gpu: (gpu.memory_mb, gpu.index))
    return [gpu.index for gpu in good]


def preference(needs: Needs, marks: frozenset[str]) -> int:
    """How little a job likes a node of these labels: less is better."""
    return len(marks.intersection(needs.anti_affinity)) - len(marks.intersection(needs.affinity))


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


def share_of(needs: Needs, node_id: str, gpus: Sequence[int]) -> Share:
    """What one node of the gang takes, with these GPUs."""
    return Share(
        node_id=node_id,
        gpus=tuple(sorted(gpus)),
        cpu_cores=needs.cpu_cores,
        ram_mb=needs.ram_mb,
        storage_mb=needs.storage_mb,
    )


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
        # Soft wishes first, then a machine that the gang does not use yet, then the tightest fit.
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
