"""What a job class runs on: what was asked for and what was given, file systems and machines, each apart."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainmaster.jobs.process import current_process

CPU = "cpu"


class Axis:
    """The axes of a topology's mesh."""

    BATCH = "batch"
    SHARD = "shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A kind of accelerator, or `cpu`."""

    name: str
    memory_bytes: int | None = None
    """Of one of them, where it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A file system's layout. Nothing in it says what computes there.

    Every place but `root` has a default below it. A place may be an `s3://` URI where nobody needs a local directory
    of it: checkpoints and data.
    """

    root: str
    name: str = "local"
    work: str | None = None
    log: str | None = None
    data: str | None = None
    checkpoints: str | None = None
    results: str | None = None
    status: str | None = None

    @property
    def checkpoints_uri(self) -> str:
        """Where checkpoints lie: a path or an `s3://` URI, as `open_root` takes it."""
        return self._place("checkpoints")

    @property
    def root_dir(self) -> Path:
        """The root as a local directory. Like all the others it is made when it is asked for."""
        return _made(self.root)

    @property
    def work_dir(self) -> Path:
        """For what is of use to this run alone."""
        return _made(self._place("work"))

    @property
    def log_dir(self) -> Path:
        """For logs; below the work directory unless it is named."""
        return _made(self.log or f"{self._place('work')}/logs")

    @property
    def data_dir(self) -> Path:
        """Where data sets lie."""
        return _made(self._place("data"))

    @property
    def checkpoints_dir(self) -> Path:
        """Where checkpoints lie, if that is a local directory."""
        return _made(self.checkpoints_uri)

    @property
    def results_dir(self) -> Path:
        """Where results lie."""
        return _made(self._place("results"))

    @property
    def status_dir(self) -> Path:
        """For what says how runs are going, such as the files of an experiment tracker."""
        return _made(self._place("status"))

    def _place(self, kind: str) -> str:
        return getattr(self, kind) or f"{self.root.rstrip('/')}/{kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMachine:
    """One machine that was given, with the file systems that it sees."""

    name: str
    cluster: Cluster
    resources: Mapping[str, int] = field(default_factory=dict)
    """Chips of each kind, by the kind's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareRequest:
    """What was asked for."""

    chip: str | None = None
    """The kind; None means any."""
    min_chips: int = 0
    """Over all machines; 0 means that a CPU is enough."""
    preferred_clusters: tuple[str, ...] = ()
    forbidden_clusters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.min_chips < 0:
            raise ValueError(f"min_chips is {self.min_chips}; it cannot be negative")
        if both := sorted({*self.preferred_clusters} & {*self.forbidden_clusters}):
            raise ValueError(f"clusters {', '.join(both)} are both preferred and forbidden")


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareResult:
    """What was given."""

    hosts: tuple[ClusterMachine, ...]
    """In the order of their node ranks."""
    chip: Chip | None = None
    """None when nothing but CPUs was given."""
    total_chips: int = 0
    requested: HardwareRequest | None = None

    def __post_init__(self) -> None:
        if not self.hosts:
            raise ValueError("a job runs on at least one host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The devices of all processes, as this one sees them, in a grid of replicas × shards."""

    chip: Chip
    device_count: int
    local_device_count: int
    process_count: int
    is_main: bool
    shard_into: int = 1
    """Devices that hold one copy of the model together. They are of one process: shards never cross hosts."""

    def __post_init__(self) -> None:
        if self.shard_into < 1 or self.local_device_count % self.shard_into:
            raise ValueError(
                f"shard_into is {self.shard_into}; it must divide the {self.local_device_count} devices of a process"
            )

    @property
    def replicas(self) -> int:
        """Copies of the model, over all processes."""
        return self.device_count // self.shard_into

    @property
    def local_replicas(self) -> int:
        """Copies of the model in this process."""
        return self.local_device_count // self.shard_into

    @property
    def mesh(self) -> Any:
        """The grid as a `jax.sharding.Mesh` with the axes `Axis.BATCH` and `Axis.SHARD`."""
        import jax
        import numpy

        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
        grid = numpy.array(devices).reshape(self.replicas, self.shard_into)
        return jax.sharding.Mesh(grid, (Axis.BATCH, Axis.SHARD))


def seen_devices(shard_into: int) -> Topology:
    """The devices that the frameworks which are imported already see; nothing heavy is loaded by this."""
    process = current_process()
    chip, local, count = _devices(process.count)
    return Topology(
        chip=chip,
        device_count=count,
        local_device_count=local,
        process_count=process.count,
        is_main=process.index == 0,
        shard_into=shard_into,
    )


def _devices(process_count: int) -> tuple[Chip, int, int]:
    """The kind of device, how many this process has, and how many there are; by what is imported already."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        # With several processes each has one device, as torchrun and our worker arrange it.
        local = torch.cuda.device_count() if process_count == 1 else 1
        return Chip(name=properties.name, memory_bytes=properties.total_memory), local, local * process_count
    if jax is not None:
        return Chip(name=jax.devices()[0].device_kind), jax.local_device_count(), jax.device_count()
    return Chip(name=CPU), 1, process_count


def _made(place: str) -> Path:
    if "://" in place:
        raise ValueError(f"{place} is no local directory")
    path = Path(place).absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path
