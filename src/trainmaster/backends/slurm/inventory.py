"""The nodes of a partition, read from `scontrol -d -o show node`, and which of their GPUs a job is given."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainmaster.backends.slurm.hostlist import split_outside
from trainmaster.backends.slurm.options import SlurmOptions
from trainmaster.protocol.request import EngineNeeds
from trainmaster.server.core.resources import Gpu, Node, NodeState, same_gpu_type

UNTYPED = "gpu"
"""The type of GPUs whose type Slurm is not told."""

_MEMORY_MB = (
    ("gb200", 189_471), ("b200", 183_359), ("h200", 143_771), ("gh200", 97_871), ("h100", 81_559), ("a100", 40_960),
    ("v100s", 32_768), ("v100", 16_384), ("p100", 16_384), ("l40s", 46_068), ("l40", 46_068), ("l4", 23_034),
    ("a40", 46_068), ("a30", 24_576), ("a10g", 23_028), ("a10", 23_028), ("a16", 15_356), ("t4", 15_360),
    ("a6000", 49_140), ("a5000", 24_564), ("a4000", 16_376), ("5090", 32_607), ("4090", 24_564), ("3090", 24_576),
    ("mi300x", 196_592), ("mi250x", 131_072), ("mi250", 131_072), ("mi210", 65_520),
)  # fmt: skip
"""The memory of well-known GPUs, the smallest that is sold of each; a type such as a100_80gb names its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """A node as Slurm shows it."""

    name: str
    address: str
    partitions: tuple[str, ...]
    cpus: int
    memory_mb: int
    storage_mb: int
    states: frozenset[str]
    reason: str = ""
    features: tuple[str, ...] = ()
    gres: tuple[tuple[str, str, int], ...] = ()
    """Name, type and count."""
    held_cpus: int = 0
    held_memory_mb: int = 0
    held_gres: tuple[tuple[str, str, int], ...] = ()

    @property
    def is_down(self) -> bool:
        return bool(self.states & _DOWN)


_DOWN = frozenset(
    {"DOWN", "ERROR", "FAIL", "FUTURE", "UNKNOWN", "NOT_RESPONDING", "NO_RESPOND", "INVAL", "INVALID_REG"}
)
_CLOSED = frozenset({"DRAIN", "DRAINED", "DRAINING", "FAILING", "MAINT", "MAINTENANCE", "PERFCTRS", "BLOCKED"})
_BUSY = frozenset({"ALLOCATED", "MIXED", "COMPLETING", "DRAINING"})
_NO_ANSWER = "*"


def nodes_of(text: str) -> tuple[SlurmNode, ...]:
    """Every node in the output of `scontrol -d -o show node`."""
    return tuple(_node(line) for line in text.splitlines() if line.startswith("NodeName="))


def _node(line: str) -> SlurmNode:
    line, _, reason = line.partition(" Reason=")
    fields = dict(re.findall(r"(?:^|\s)([A-Z]\w*)=(\S*)", line))
    words = fields.get("State", "UNKNOWN").split("+")
    states = {re.sub(r"[^A-Z_]", "", word) for word in words}
    if _NO_ANSWER in "".join(words):
        states.add("NOT_RESPONDING")
    return SlurmNode(
        name=fields["NodeName"],
        address=_given(fields.get("NodeAddr")) or fields["NodeName"],
        partitions=tuple(_given(fields.get("Partitions")).split(",")),
        cpus=_number(fields.get("CPUEfctv") or fields.get("CPUTot")),
        memory_mb=max(0, _number(fields.get("RealMemory")) - _number(fields.get("MemSpecLimit"))),
        storage_mb=_number(fields.get("TmpDisk")),
        states=frozenset(states),
        reason=reason.partition(" Comment=")[0].strip(),
        features=tuple(filter(None, _given(fields.get("AvailableFeatures")).split(","))),
        gres=all_gres(fields.get("Gres")),
        held_cpus=_number(fields.get("CPUAlloc")),
        held_memory_mb=_number(fields.get("AllocMem")),
        held_gres=all_gres(fields.get("GresUsed")),
    )


def _given(text: str | None) -> str:
    return "" if text in (None, "(null)", "N/A") else str(text)


def _number(text: str | None) -> int:
    found = re.match(r"\d+", text or "")
    return int(found[0]) if found else 0


def all_gres(text: str | None) -> tuple[tuple[str, str, int], ...]:
    """Name, type and count of each entry of Gres."""
    return tuple(_gres(each) for each in split_outside(_given(text), "()"))


def _gres(text: str) -> tuple[str, str, int]:
    """Name, type and count of an entry such as `gpu:h100:4(S:0-1)`, `gpu:2` or `shard`."""
    name, *rest = text.partition("(")[0].split(":")
    count = int(rest.pop()) if rest and rest[-1].isdigit() else 1
    return name, ":".join(rest), count


def as_node(node: SlurmNode, backend: str, options: SlurmOptions) -> Node:
    state = _state(node)
    kinds = [kind for name, kind, count in node.gres if name == options.gres for _ in range(count)]
    return Node(
        node_id=f"{backend}:{node.name}",
        backend=backend,
        hostname=node.name,
        address=node.address,
        cpu_cores=node.cpus,
        ram_mb=node.memory_mb,
        storage_mb=node.storage_mb,
        gpus=tuple(
            Gpu(
                index=index,
                device=str(index),
                type=kind or UNTYPED,
                memory_mb=gpu_memory_mb(kind, options),
            )
            for index, kind in enumerate(kinds)
        ),
        labels=node.features,
        capabilities=node.features,
        slots=max(1, node.cpus),
        state=state,
        drain_reason="" if state is NodeState.READY else node.reason or f"Slurm: {_words(node)}",
        held_gpus=sum(count for name, _, count in node.held_gres if name == options.gres),
        held_cpu_cores=node.held_cpus,
        held_ram_mb=node.held_memory_mb,
    )


def _state(node: SlurmNode) -> NodeState:
    if node.is_down:
        return NodeState.OFFLINE
    if node.states & _CLOSED:
        return NodeState.DRAINING if node.states & _BUSY else NodeState.DRAINED
    return NodeState.READY


def _words(node: SlurmNode) -> str:
    return " and ".join(sorted(word.lower() for word in node.states))


def gpu_memory_mb(kind: str, options: SlurmOptions) -> int:
    """The memory of a type: as its name says, of the well-known type, or as the operator says; 0: unknown.

    >>> gpu_memory_mb("a100_80gb", SlurmOptions()), gpu_memory_mb("nvidia_h100_nvl", SlurmOptions())
    (81920, 81559)
    """
    words = re.findall(r"[a-z0-9]+", kind.lower())
    # A slice such as 3g.20gb has 20 GB.
    if own := max((int(found[1]) for word in words if (found := re.fullmatch(r"(\d+)gb?", word))), default=0):
        return own * 1024
    known = next((memory_mb for name, memory_mb in _MEMORY_MB if name in words), 0)
    return known or options.gpu_memory_mb


# -- what a job asks for --


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuChoice:
    """How the GPUs of a job are asked for."""

    gres: str = ""
    feature: str = ""
    """A feature that tells the type, where Gres does not."""
    problem: str = ""
    """Why no node could have them."""


def choose_gpus(needs: EngineNeeds, nodes: Sequence[SlurmNode], options: SlurmOptions) -> GpuChoice:
    """Gres names a single type: of those that do, the most frequent. Without nodes, the type as it was asked for."""
    if not needs.gpus:
        return GpuChoice()
    any_type = f"{options.gres}:{needs.gpus}"
    if not nodes:
        return GpuChoice(gres=f"{options.gres}:{_plain(needs.gpu_type)}:{needs.gpus}" if needs.gpu_type else any_type)
    counts = Counter[str]()
    for node in nodes:
        for name, kind, count in node.gres:
            if name == options.gres:
                counts[kind] += count
    named = [kind for kind in counts if needs.gpu_type is None or same_gpu_type(needs.gpu_type, kind)]
    features = []
    if needs.gpu_type is not None and not named:
        features = _frequent(name for node in nodes for name in node.features if same_gpu_type(needs.gpu_type, name))
        named = list(counts) if features else []
    fit = [kind for kind in named if gpu_memory_mb(kind, options) >= needs.gpu_memory_min_mb]
    if not fit:
        return GpuChoice(gres=any_type, problem=_no_such_gpu(needs, counts, options))
    if features:
        return GpuChoice(gres=any_type, feature=features[0])
    if len(fit) == len(counts):
        return GpuChoice(gres=any_type)
    best = max(fit, key=lambda kind: (counts[kind], kind))
    return GpuChoice(gres=f"{options.gres}:{best}:{needs.gpus}" if best else any_type)


def preferable(affinity: Sequence[str], count: int, nodes: Sequence[SlurmNode]) -> tuple[str, ...]:
    """The preferred features that as many nodes have together: a preference that cannot be met, Slurm refuses."""
    chosen: tuple[str, ...] = ()
    for name in affinity:
        if sum({*chosen, name} <= {*node.features} for node in nodes) >= count:
            chosen = (*chosen, name)
    return chosen


def _frequent(names: Iterable[str]) -> list[str]:
    return [name for name, _ in Counter(names).most_common()]


def _plain(kind: str | None) -> str:
    """A type as Slurm could have it: users write any text."""
    return re.sub(r"[^a-z0-9._-]+", "_", (kind or "").lower()).strip("_") or UNTYPED


def _no_such_gpu(needs: EngineNeeds, counts: Counter[str], options: SlurmOptions) -> str:
    wanted = f"of type {_plain(needs.gpu_type)}" if needs.gpu_type else "at all"
    if needs.gpu_memory_min_mb:
        wanted += f" with {needs.gpu_memory_min_mb} MB"
    if not counts:
        return f"no node of the partition has GPUs (Gres named {options.gres})"
    known = ", ".join(f"{kind or UNTYPED} ({gpu_memory_mb(kind, options) or '?'} MB)" for kind in sorted(counts))
    return f"no node of the partition has GPUs {wanted}; it has {known}. The option gpu_memory_mb says what others have"
