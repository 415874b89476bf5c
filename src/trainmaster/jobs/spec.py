"""The identity (`JobSpec`) and the hardware (`ExecutionSpec`) of a job class."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any, Self

from trainmaster.jobs.checkpoint import check_path
from trainmaster.jobs.process import current_process
from trainmaster.protocol.launch import SEGMENT_SAYS, is_segment

# What a job class runs on: what was asked for and what was given, file systems and machines, each apart.

CPU = "cpu"


class Axis:
    BATCH = "batch"
    SHARD = "shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A kind of accelerator, or `cpu`."""

    name: str
    memory_bytes: int | None = None
    """Of one chip, if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The directories of a file system, by default below `root`. Checkpoints and data may be `s3://` URIs."""

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
        """Where checkpoints are: a path or an `s3://` URI, for `open_root`."""
        return self._place("checkpoints")

    @property
    def root_dir(self) -> Path:
        """The root as a local directory. Like all the others it is created on access."""
        return _made(self.root)

    @property
    def work_dir(self) -> Path:
        """For files of this run alone."""
        return _made(self._place("work"))

    @property
    def log_dir(self) -> Path:
        return _made(self.log or f"{self._place('work')}/logs")

    @property
    def data_dir(self) -> Path:
        return _made(self._place("data"))

    @property
    def checkpoints_dir(self) -> Path:
        """For checkpoints, if that is a local directory."""
        return _made(self.checkpoints_uri)

    @property
    def results_dir(self) -> Path:
        return _made(self._place("results"))

    @property
    def status_dir(self) -> Path:
        """For the state of runs, such as the files of an experiment tracker."""
        return _made(self._place("status"))

    def _place(self, kind: str) -> str:
        return getattr(self, kind) or f"{self.root.rstrip('/')}/{kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMachine:
    """A machine of the job, with the file systems that it sees."""

    name: str
    cluster: Cluster
    resources: Mapping[str, int] = field(default_factory=dict)
    """Chips of each kind, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareRequest:
    chip: str | None = None
    """The kind; None: any."""
    min_chips: int = 0
    """Over all machines; 0: a CPU is enough."""
    preferred_clusters: tuple[str, ...] = ()
    forbidden_clusters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.min_chips < 0:
            raise ValueError(f"min_chips is {self.min_chips}; it cannot be negative")
        if both := sorted({*self.preferred_clusters} & {*self.forbidden_clusters}):
            raise ValueError(f"clusters {', '.join(both)} are both preferred and forbidden")


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareResult:
    hosts: tuple[ClusterMachine, ...]
    """In the order of their node ranks."""
    chip: Chip | None = None
    """None if there are only CPUs."""
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
    """Devices that hold one copy of the model together. They belong to one process: shards never cross hosts."""

    def __post_init__(self) -> None:
        if self.shard_into < 1 or self.local_device_count % self.shard_into:
            raise ValueError(
                f"shard_into is {self.shard_into}; it must divide the {self.local_device_count} devices of a process"
            )

    @property
    def replicas(self) -> int:
        """Copies of the model over all processes."""
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
        return jax.sharding.Mesh(numpy.array(devices).reshape(self.replicas, self.shard_into), (Axis.BATCH, Axis.SHARD))


def seen_devices(shard_into: int) -> Topology:
    """The devices that already imported frameworks see; nothing heavy is loaded."""
    process = current_process()
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    chip, local, count = Chip(name=CPU), 1, process.count
    if torch is not None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        chip = Chip(name=properties.name, memory_bytes=properties.total_memory)
        # With several processes each has one device, as torchrun and our worker arrange it.
        local = torch.cuda.device_count() if process.count == 1 else 1
        count = local * process.count
    elif jax is not None:
        chip = Chip(name=jax.devices()[0].device_kind)
        local, count = jax.local_device_count(), jax.device_count()
    return Topology(
        chip=chip,
        device_count=count,
        local_device_count=local,
        process_count=process.count,
        is_main=process.index == 0,
        shard_into=shard_into,
    )


def _made(place: str) -> Path:
    if "://" in place:
        raise ValueError(f"{place} is no local directory")
    path = Path(place).absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


DEFAULT_PROJECT = "general"
DEFAULT_GROUP = "default"


@dataclass(slots=True, kw_only=True)
class JobSpec:
    """The identity of a job. Its checkpoints are below project, group and name; a resume restores all four fields.

    A project or group of None is the default one. A class that starts a tracker itself may set `id`.
    """

    name: str
    id: str | None = None
    """The run of the experiment tracker, once it has started."""
    project: str = DEFAULT_PROJECT
    group: str = DEFAULT_GROUP

    def __post_init__(self) -> None:
        self.project = self.project or DEFAULT_PROJECT
        self.group = self.group or DEFAULT_GROUP
        for what in ("project", "group", "name"):
            if not is_segment(value := getattr(self, what)):
                raise ValueError(f"{what} {value!r}: it {SEGMENT_SAYS}")

    @property
    def path(self) -> str:
        """`project/group/name`: where this job's files are below each directory of its cluster."""
        return f"{self.project}/{self.group}/{self.name}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    model_dump = to_json

    def model_dump_json(self, *, indent: int | None = None) -> str:
        return json.dumps(self.to_json(), indent=indent)


@dataclass(slots=True, kw_only=True)
class ExecutionSpec(JobSpec):
    """A job's identity and everything that it runs on."""

    hardware: HardwareResult
    topology: Topology | None = None
    distributed: bool = False
    node: int = 0
    """The index of this process's host."""

    @classmethod
    def local(
        cls,
        root_dir: str | os.PathLike[str],
        name: str = "local",
        project: str | None = None,
        group: str | None = None,
        shard_into: int | None = None,
    ) -> Self:
        """This machine, as already imported frameworks see it, with all files below `root_dir` (or its `s3://` URI)."""
        root = os.fspath(root_dir)
        cluster = Cluster(root=root if "://" in root else os.path.abspath(os.path.expanduser(root)))
        return cls.on(cluster, name=name, project=project, group=group, shard_into=shard_into)

    @classmethod
    def on(
        cls,
        cluster: Cluster,
        *,
        name: str,
        project: str | None = None,
        group: str | None = None,
        shard_into: int | None = None,
        nodes: int = 1,
        node: int = 0,
        requested: HardwareRequest | None = None,
    ) -> Self:
        """This process on a cluster, with the devices that its frameworks see; all machines are assumed to be alike.

        Where machines run several processes each, every process counts as a host: `hosts[process.index]` is its own.
        """
        topology = seen_devices(shard_into or 1)
        if topology.process_count > nodes:
            nodes, node = topology.process_count, current_process().index
        accelerated = topology.chip.name != CPU
        per_node = topology.device_count // nodes if accelerated else 0
        machine = ClusterMachine(
            name=socket.gethostname(), cluster=cluster, resources={topology.chip.name: per_node} if accelerated else {}
        )
        others = (replace(machine, name=f"node-{index}") for index in range(nodes))
        return cls(
            name=name,
            project=project or DEFAULT_PROJECT,
            group=group or DEFAULT_GROUP,
            hardware=HardwareResult(
                hosts=tuple(machine if index == node else other for index, other in enumerate(others)),
                chip=topology.chip if accelerated else None,
                total_chips=per_node * nodes,
                requested=requested,
            ),
            topology=topology,
            distributed=topology.process_count > 1,
            node=node,
        )

    @property
    def cluster(self) -> Cluster:
        """The file systems that this process sees."""
        return self.hardware.hosts[self.node].cluster

    def with_identity(self, saved: Mapping[str, Any]) -> Self:
        """This hardware under a saved identity."""
        known = {each.name for each in fields(JobSpec)}
        return replace(self, **{name: value for name, value in saved.items() if name in known})

    def result_path(self, name: str) -> Path:
        """The path of a result: `results/project/group/job/name`, where `name` is a plain relative path."""
        return self.cluster.results_dir / self.path / check_path(name)

    @contextlib.contextmanager
    def result(
        self, name: str, main_process_only: bool = True, mode: str = "w", encoding: str | None = "utf-8"
    ) -> Iterator[IO[Any] | None]:
        """Write a result file atomically: it exists at the end of the block, and not if the block fails.

        With `main_process_only` the other processes get None, and all wait for each other before and after. Otherwise
        each process writes a file and should choose its own name. A mode that appends or updates works on the file
        directly.
        """
        process = current_process()
        path = self.result_path(name)
        if not main_process_only:
            with _written(path, mode, encoding) as file:
                yield file
            return
        process.barrier(f"{self.path}:result:pre")
        if process.index == 0:
            with _written(path, mode, encoding) as file:
                yield file
        else:
            yield None
        process.barrier(f"{self.path}:result:post")


@contextlib.contextmanager
def _written(path: Path, mode: str, encoding: str | None) -> Iterator[IO[Any]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    encoding = None if "b" in mode else encoding
    if not mode.startswith(("w", "x")):
        with open(path, mode, encoding=encoding) as file:
            yield file
        return
    if mode.startswith("x") and path.exists():
        raise FileExistsError(f"{path} is there already")
    draft = path.with_name(f".{path.name}-{os.urandom(4).hex()}")
    try:
        with open(draft, mode.replace("w", "x"), encoding=encoding) as file:
            yield file
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
