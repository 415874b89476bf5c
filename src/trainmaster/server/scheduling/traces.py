"""Traces, the input of a simulation: a cluster, and jobs with arrival and true duration; in files, a JSON line each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainmaster.server.core.resources import Gpu, JobQueue, Needs, Node, needs_from_json, needs_to_json
from trainmaster.server.core.spec.configs import HIGHEST_PRIORITY

BACKEND = "simulated"
DEFAULT_SAVE_S = 10.0
"""What a job of ours typically takes to write a checkpoint when it has to stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    name: str
    arrival_s: float
    """After the beginning of the trace."""
    duration_s: float
    """What it really runs for when nobody stops it."""
    needs: Needs = Needs(gpus_per_node=1)
    priority: int = 5
    queue: str = "default"
    preemptible: bool = False
    max_retries: int = 1
    max_runtime_s: float | None = None
    """All that the scheduler knows of the duration; an attempt that reaches it ends in a time-out."""
    save_s: float = DEFAULT_SAVE_S
    """From the request to stop until it has saved. What takes longer than the grace period is not saved."""
    class_name: str = ""
    """Waiting times are reported by class; empty: by priority."""

    @property
    def label(self) -> str:
        return self.class_name or f"priority {self.priority}"

    @property
    def gpus(self) -> int:
        """GPUs of the whole gang."""
        return (self.needs.gpus_per_node or 0) * self.needs.node_count

    @property
    def cpu_cores(self) -> int:
        """Cores of the whole gang."""
        return self.needs.cpu_cores * self.needs.node_count


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """A node that is drained, comes back, or goes away at some time."""

    at_s: float
    node: Node
    """As it is from then on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    name: str
    jobs: Sequence[TraceJob]
    nodes: Sequence[Node]
    queues: Sequence[JobQueue] = ()
    changes: Sequence[NodeChange] = ()


class TraceError(ValueError):
    """A trace cannot be read."""


def uniform_nodes(
    count: int,
    *,
    gpus: int = 8,
    gpu_type: str = "H100-80GB",
    gpu_memory_mb: int = 81_920,
    cpu_cores: int = 128,
    ram_mb: int = 1_048_576,
    storage_mb: int = 8_388_608,
    slots: int | None = None,
    capabilities: tuple[str, ...] = (),
    prefix: str = "node",
) -> list[Node]:
    """Identical nodes. Without `slots`, each runs as many jobs as it has GPUs or cores."""
    units = tuple(Gpu(index=index, device=str(index), type=gpu_type, memory_mb=gpu_memory_mb) for index in range(gpus))
    width = len(str(max(count - 1, 0)))
    return [
        Node(
            node_id=(name := f"{prefix}-{index:0{width}}"),
            backend=BACKEND,
            hostname=name,
            cpu_cores=cpu_cores,
            ram_mb=ram_mb,
            storage_mb=storage_mb,
            gpus=units,
            capabilities=capabilities,
            slots=slots if slots is not None else max(gpus, cpu_cores),
        )
        for index in range(count)
    ]


def to_line(job: TraceJob) -> str:
    """The job as a line of a recorded trace, without what is at its default."""
    needs = needs_to_json(job.needs)
    size = {"gpus": needs.pop("gpus_per_node", 0), "nodes": needs.pop("node_count", 1)}
    document = {"name": job.name, "arrival_s": job.arrival_s, "duration_s": job.duration_s, **size, **needs}
    for name in ("priority", "queue", "preemptible", "max_retries", "max_runtime_s", "save_s"):
        if getattr(job, name) != TraceJob.__dataclass_fields__[name].default:
            document[name] = getattr(job, name)
    if job.class_name:
        document["class"] = job.class_name
    return json.dumps(document, ensure_ascii=False)


def from_line(line: str) -> TraceJob:
    """The job of a line of a recorded trace; `gpus` are those of each of its `nodes`. TraceError says what is wrong.

    >>> from_line('{"arrival_s": 0, "duration_s": 60, "gpus": 8, "nodes": 2}').gpus
    16
    """
    try:
        document = json.loads(line)
    except ValueError as error:
        raise TraceError(f"is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise TraceError("must be an object")
    if unknown := document.keys() - _READERS.keys():
        raise TraceError(f"has unknown fields: {', '.join(sorted(unknown))}; known are {', '.join(sorted(_READERS))}")
    values = {name: _READERS[name](name, value) for name, value in document.items() if value is not None}
    for required in ("arrival_s", "duration_s"):
        _seconds(required, values.get(required))
    if values.get("priority", 0) > HIGHEST_PRIORITY:
        raise TraceError(f"priority must be from 0 to {HIGHEST_PRIORITY}")
    needs = {
        "gpus_per_node": values.pop("gpus", 0),
        "node_count": max(values.pop("nodes", 1), 1),
        **{name: values.pop(name) for name in Needs.__dataclass_fields__ if name in values},
    }
    return TraceJob(
        name=values.pop("name", ""), class_name=values.pop("class", ""), needs=needs_from_json(needs), **values
    )


def from_lines(lines: Iterable[str]) -> list[TraceJob]:
    """All jobs of a recorded trace; empty lines are passed over. A TraceError has the number of the line."""
    jobs = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                jobs.append(from_line(line))
            except TraceError as error:
                raise TraceError(f"line {number} {error}") from None
    if not jobs:
        raise TraceError("has no jobs")
    return jobs


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise TraceError(f"{name} must be a number of seconds, 0 or more")
    return float(value)


def _natural(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TraceError(f"{name} must be a whole number, 0 or more")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TraceError(f"{name} must be text")
    return value


def _texts(name: str, value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TraceError(f"{name} must be a list of texts")
    return value


_READERS: Mapping[str, Callable[[str, object], Any]] = {
    **dict.fromkeys(("arrival_s", "duration_s", "max_runtime_s", "save_s"), _seconds),
    **dict.fromkeys(("gpus", "nodes", "cpu_cores", "ram_mb", "storage_mb", "gpu_memory_min_mb"), _natural),
    **dict.fromkeys(("priority", "max_retries"), _natural),
    **dict.fromkeys(("name", "class", "gpu_type", "queue"), _text),
    **dict.fromkeys(("capabilities", "affinity", "anti_affinity"), _texts),
    "preemptible": lambda _, value: bool(value),
}
