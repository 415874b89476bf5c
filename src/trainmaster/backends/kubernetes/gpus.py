"""Which nodes have the GPUs that a job asks for, by the labels of their types. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainmaster.backends.kubernetes.options import KubernetesOptions
from trainmaster.protocol.request import EngineNeeds
from trainmaster.server.core.resources import Gpu, same_gpu_type

UNTYPED = "gpu"
"""The type of GPUs whose node does not tell it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKind:
    """GPUs of one type as nodes have them."""

    type: str
    """The value of the label; empty: the node has none."""
    memory_mb: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuChoice:
    """How the GPUs of a job are asked for."""

    values: tuple[str, ...] = ()
    """Values of the label of the type, each of which would do; empty: any GPU would."""
    problem: str = ""
    """Why no node could have them."""


def gpus_of(labels: Mapping[str, str], count: int, options: KubernetesOptions) -> tuple[Gpu, ...]:
    """The GPUs of a node with these labels."""
    kind = kind_of(labels, options)
    return tuple(
        Gpu(index=index, device=str(index), type=kind.type or UNTYPED, memory_mb=kind.memory_mb)
        for index in range(count)
    )


def kind_of(labels: Mapping[str, str], options: KubernetesOptions) -> GpuKind:
    name = labels.get(options.gpu_type_label, "")
    if not name and "/mig-" in options.gpu_resource:
        name = options.gpu_resource.rpartition("/")[2]
    told = labels.get(options.gpu_memory_label, "")
    memory_mb = int(told) if told.isdigit() else named_memory_mb(name) or options.gpu_memory_mb
    return GpuKind(type=name, memory_mb=memory_mb)


def named_memory_mb(name: str) -> int:
    """The memory that a type names.

    >>> named_memory_mb("NVIDIA-H100-80GB-HBM3"), named_memory_mb("mig-3g.20gb"), named_memory_mb("Tesla-T4")
    (81920, 20480, 0)
    """
    return max((int(size) for size in re.findall(r"(\d+)gb", name.lower())), default=0) * 1024


def choose_gpus(needs: EngineNeeds, known: Iterable[GpuKind], options: KubernetesOptions) -> GpuChoice:
    """By the kinds of GPUs that there are. Without any, the type is taken as the user wrote it."""
    if not needs.gpus or not (needs.gpu_type or needs.gpu_memory_min_mb):
        return GpuChoice()
    kinds = sorted(set(known), key=lambda kind: (kind.type, kind.memory_mb))
    if not kinds:
        return GpuChoice(values=(_plain(needs.gpu_type),) if needs.gpu_type and options.gpu_type_label else ())
    fit = [
        kind
        for kind in kinds
        if (needs.gpu_type is None or same_gpu_type(needs.gpu_type, kind.type or UNTYPED))
        and kind.memory_mb >= needs.gpu_memory_min_mb
    ]
    if not fit:
        return GpuChoice(problem=_no_such_gpu(needs, kinds))
    if len(fit) == len(kinds) or not all(kind.type for kind in fit):
        return GpuChoice()
    return GpuChoice(values=tuple(dict.fromkeys(kind.type for kind in fit)))


def _plain(kind: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", kind)[:63].strip("-_.")


def _no_such_gpu(needs: EngineNeeds, kinds: Sequence[GpuKind]) -> str:
    wanted = f"of type {needs.gpu_type}" if needs.gpu_type else "at all"
    if needs.gpu_memory_min_mb:
        wanted += f" with {needs.gpu_memory_min_mb} MB"
    there = ", ".join(f"{kind.type or UNTYPED} ({kind.memory_mb or '?'} MB)" for kind in kinds)
    return f"no node has GPUs {wanted}; there are {there}. The option gpu_memory_mb says what others have"
