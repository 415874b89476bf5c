"""What a job class is told: who it is (`JobSpec`), and where and on what it runs (`ExecutionSpec`)."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, Any, Self

from trainmaster.jobs.hardware import (
    CPU,
    Cluster,
    ClusterMachine,
    HardwareRequest,
    HardwareResult,
    Topology,
    seen_devices,
)
from trainmaster.jobs.process import current_process
from trainmaster.jobs.roots import checked
from trainmaster.protocol.launch import SEGMENT_SAYS, is_segment

DEFAULT_PROJECT = "general"
DEFAULT_GROUP = "default"


@dataclass(slots=True, kw_only=True)
class JobSpec:
    """Who a job is. Project, group and name are where its checkpoints lie; a resume restores all four fields.

    A project or group of None is the default one. A class that starts a tracker itself may set `id`.
    """

    name: str
    id: str | None = None
    """The run of the experiment tracker; known once the tracker has begun."""
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
        """`project/group/name`: where this job's own files lie below each directory of its cluster."""
        return f"{self.project}/{self.group}/{self.name}"

    def to_json(self) -> dict[str, Any]:
        """All fields, plain."""
        return asdict(self)

    def model_dump(self) -> dict[str, Any]:
        """All fields, plain; by the name that a pydantic model has for it."""
        return self.to_json()

    def model_dump_json(self, *, indent: int | None = None) -> str:
        """All fields as JSON; by the name that a pydantic model has for it."""
        return json.dumps(self.to_json(), indent=indent)


@dataclass(slots=True, kw_only=True)
class ExecutionSpec(JobSpec):
    """A job's identity with all that it was given to run on."""

    hardware: HardwareResult
    topology: Topology | None = None
    distributed: bool = False
    """Whether there is more than one process."""
    node: int = 0
    """Which of the hosts this process runs on."""

    @classmethod
    def local(
        cls,
        root_dir: str | os.PathLike[str],
        name: str = "local",
        project: str | None = None,
        group: str | None = None,
        shard_into: int | None = None,
    ) -> Self:
        """This machine, with all files below `root_dir` (or its `s3://` URI), and the devices that can be seen.

        Only frameworks that are imported already are asked for devices: nothing heavy is loaded by this.
        """
        return cls.on(Cluster(root=_absolute(root_dir)), name=name, project=project, group=group, shard_into=shard_into)

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
        """This process on a cluster, with what its frameworks see; all machines are taken to be alike.

        Where machines run several processes each, every process counts as a host: `hosts[process.index]` is its own.
        """
        topology = seen_devices(shard_into or 1)
        if topology.process_count > nodes:
            nodes, node = topology.process_count, current_process().index
        accelerated = topology.chip.name != CPU
        per_node = topology.device_count // nodes if accelerated else 0
        machine = ClusterMachine(
            name=socket.gethostname(),
            cluster=cluster,
            resources={topology.chip.name: per_node} if accelerated else {},
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
        """This allocation under a saved identity: every field of `JobSpec` that is there, and nothing else."""
        known = {each.name for each in fields(JobSpec)}
        return replace(self, **{name: value for name, value in saved.items() if name in known})

    def result_path(self, name: str) -> Path:
        """Where a result of this job lies: `results/project/group/job/name`.

        Raises:
            ValueError: `name` is no plain relative path.
        """
        return self.cluster.results_dir / self.path / checked(name)

    @contextlib.contextmanager
    def result(
        self, name: str, main_process_only: bool = True, mode: str = "w", encoding: str | None = "utf-8"
    ) -> Iterator[IO[Any] | None]:
        """A file for a result, written as a whole: it is there at the end of the block, and not when the block fails.

        With `main_process_only` the other processes get None, and all of them wait for each other before and after.
        Otherwise each writes a file of its own and should choose a name of its own. A mode that appends or changes a
        file works on it directly.
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


def _absolute(place: str | os.PathLike[str]) -> str:
    text = os.fspath(place)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))
