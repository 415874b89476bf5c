"""A client of one Slurm cluster, reached by its programs or by slurmrestd."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from trainmaster.backends.base import Loss
from trainmaster.backends.cluster.engine import (
    EngineAwayError,
    EngineJob,
    EngineLaunch,
    EnginePhase,
    EngineRefusedError,
)
from trainmaster.backends.slurm.access import Partition, SlurmAccess, SlurmRefusedError
from trainmaster.backends.slurm.commands import TIMEOUT_S
from trainmaster.backends.slurm.inventory import GpuChoice, SlurmNode, as_node, choose_gpus, preferable
from trainmaster.backends.slurm.listing import SlurmJob, engine_job
from trainmaster.backends.slurm.options import SlurmOptions
from trainmaster.backends.slurm.programs import SlurmPrograms
from trainmaster.backends.slurm.refusals import explained
from trainmaster.backends.slurm.render import batch_script
from trainmaster.backends.slurm.rest import SlurmRest
from trainmaster.protocol.reasons import Reason
from trainmaster.server.core.reports import EngineFacts
from trainmaster.server.core.resources import Node

_log = logging.getLogger(__name__)

_NODES_FRESH_S = 300.0
"""Types of GPUs and features seldom change."""
_NODES_RECENT_S = 15.0
"""A job on an unknown node does not have nodes listed more often."""


class SlurmEngine:
    """Jobs belong to the server's user or to those of its accounts, and their names begin with the instance."""

    kind = "slurm"
    node_variable = "SLURM_NODEID"

    def __init__(self, name: str, instance: str, options: SlurmOptions, *, timeout_s: float = TIMEOUT_S) -> None:
        self._name = name
        self._instance = instance
        self._options = options
        by = SlurmRest if options.rest_url else SlurmPrograms
        self._access: SlurmAccess = by(instance, options, timeout_s=timeout_s)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._nodes: tuple[SlurmNode, ...] = ()
        """All nodes of the cluster, as last seen."""
        self._nodes_at = float("-inf")
        self._default_partition = ""
        self._max_minutes: int | None = None
        """The longest time limit in the partition, as last seen."""
        self._listed: dict[str, EngineJob] = {}
        """As of the last list: what is missing from the next one has been purged."""
        self._purged: dict[str, EngineJob] = {}
        """Jobs that ended and were forgotten by the controller between two lists."""
        self._forgotten: set[str] = set()
        """Handles that the controller still lists."""
        self._failures: dict[int, str] = {}
        """Job that lost a node -> which nodes were down."""

    def facts(self) -> EngineFacts:
        try:
            cluster = self._access.cluster()
        except EngineAwayError as error:
            return EngineFacts(problem=str(error))
        partitions = cluster.partitions
        partition, problem = self._partition_in(partitions), ""
        names = ", ".join(sorted(partitions)) or "none"
        if not partition:
            problem = f"the cluster has no default partition: name one with the option partition; there are: {names}"
        elif partition not in partitions:
            problem = f"there is no partition {partition}: change the option partition; there are: {names}"
        elif (state := partitions[partition].state) != "UP":
            problem = f"the partition {partition} is {state}: jobs wait until it is UP"
        elif self._options.account_users and os.geteuid() != 0:
            problem = "the option account_users needs a server that runs as root: run it so, or leave the option out"
        return EngineFacts(
            name=f"Slurm {cluster.version}".strip(),
            host=f"{cluster.name}, partition {partition}".strip(", "),
            problem=problem,
        )

    def document(self, launch: EngineLaunch) -> str:
        gpus = choose_gpus(launch.needs, self._members(), self._options)
        return self._script(launch, gpus)

    def start(self, launch: EngineLaunch, *, is_new: bool = False) -> str:
        if not is_new and (present := self.find(launch.name)) is not None:
            return present.handle
        if time.monotonic() - self._nodes_at > _NODES_FRESH_S:
            self.nodes()
        gpus = choose_gpus(launch.needs, self._members(), self._options)
        if gpus.problem:
            raise EngineRefusedError(gpus.problem)
        if (limit_s := self._time_limit_s()) is not None and (launch.request.max_runtime_s or 0.0) > limit_s:
            raise EngineRefusedError(
                f"its max_runtime_seconds exceed the time limit of the partition, {limit_s:.0f} s: submit it with no "
                "more, or have the operator choose another partition"
            )
        try:
            return self._access.submit(launch, self._script(launch, gpus))
        except SlurmRefusedError as error:
            raise EngineRefusedError(explained(str(error))) from error

    def find(self, name: str) -> EngineJob | None:
        found = (job for job in self._access.jobs(name) if job.name == name)
        first = min(found, key=lambda job: job.job_id, default=None)
        if first is None:
            with self._lock:
                if (purged := self._purged.get(name)) is not None:
                    return purged
            first = next((job for job in self._access.ended(names=(name,)) if job.name == name), None)
        return self._described([first])[name] if first is not None else None

    def jobs(self) -> Mapping[str, EngineJob]:
        found = self._access.jobs()
        first: dict[str, SlurmJob] = {}
        for job in sorted(found, key=lambda job: job.job_id):
            if first.setdefault(job.name, job) is not job and not job.has_ended:
                # The answer to a submission was lost, and it was sent again.
                _log.warning("%s is on %s twice; job %d is cancelled", job.name, self._name, job.job_id)
                self.cancel(str(job.job_id))
            elif job.was_requeued:
                _log.warning("%s was requeued on %s; job %d is cancelled", job.name, self._name, job.job_id)
                self.cancel(str(job.job_id))
        listed = self._described(first.values())
        with self._lock:
            last = self._listed.items()
            missing = {name: job for name, job in last if name not in listed and job.phase is not EnginePhase.ENDED}
        purged = self._outcomes(missing)
        with self._lock:
            self._listed = listed
            self._purged |= purged
            handles = {job.handle for job in listed.values()}
            self._forgotten &= handles
            for job_id in [job_id for job_id in self._failures if str(job_id) not in handles]:
                del self._failures[job_id]
            known = {**self._purged, **listed}
            return {name: job for name, job in known.items() if job.handle not in self._forgotten}

    def wait(self, timeout_s: float) -> None:
        """Slurm reports no changes: this is a pause."""
        self._closed.wait(timeout_s)

    def cancel(self, handle: str) -> None:
        self._access.cancel(handle)

    def forget(self, handle: str) -> None:
        """Slurm keeps nothing of an ended job but its record, for MinJobAge seconds."""
        with self._lock:
            for name in [name for name, job in self._purged.items() if job.handle == handle]:
                del self._purged[name]
            if any(job.handle == handle for job in self._listed.values()):
                self._forgotten.add(handle)

    def nodes(self) -> Sequence[Node]:
        nodes = self._access.nodes()
        partitions = self._access.cluster().partitions
        partition = partitions.get(self._partition_in(partitions))
        with self._lock:
            self._nodes, self._nodes_at = nodes, time.monotonic()
            # Jobs of a quality of service may exceed it.
            self._max_minutes = partition.max_minutes if partition is not None and not self._options.qos else None
        limit_s = self._time_limit_s()
        return [replace(as_node(node, self._name, self._options), time_limit_s=limit_s) for node in self._members()]

    def close(self) -> None:
        self._closed.set()
        self._access.close()

    # -- putting together --

    def _partition_in(self, partitions: Mapping[str, Partition]) -> str:
        default = next((name for name, partition in partitions.items() if partition.is_default), "")
        self._default_partition = default
        return self._options.partition or default

    def _script(self, launch: EngineLaunch, gpus: GpuChoice) -> str:
        preferred = preferable(launch.needs.affinity, launch.node_count, self._members())
        return batch_script(launch, self._options, gpus, preferred, max_minutes=self._max_minutes)

    def _time_limit_s(self) -> float | None:
        return None if self._max_minutes is None else 60.0 * self._max_minutes

    def _members(self) -> tuple[SlurmNode, ...]:
        """The nodes of the partition, as last seen."""
        partition = self._options.partition or self._default_partition
        return tuple(node for node in self._nodes if partition in node.partitions)

    def _described(self, jobs: Iterable[SlurmJob]) -> dict[str, EngineJob]:
        listed = list(jobs)
        hosts = {host for job in listed for host in job.hosts}
        is_recent = time.monotonic() - self._nodes_at < _NODES_RECENT_S
        if hosts - {node.name for node in self._nodes} and not is_recent:
            with contextlib.suppress(EngineAwayError):
                self.nodes()
        addresses = {node.name: node.address for node in self._nodes}
        return {
            job.name: engine_job(job, self._options, addresses, failed_nodes=self._failed_nodes(job)) for job in listed
        }

    def _failed_nodes(self, job: SlurmJob) -> str:
        """Which nodes of a job that lost one are down; asked once, as they may come back."""
        if not job.state.startswith("NODE_FAIL"):
            return ""
        with self._lock:
            known = self._failures.get(job.job_id)
        if known is None:
            with contextlib.suppress(EngineAwayError):
                self.nodes()
            known = ", ".join(node.name for node in self._nodes if node.name in job.hosts and node.is_down)
            with self._lock:
                self._failures[job.job_id] = known
        return known

    def _outcomes(self, missing: Mapping[str, EngineJob]) -> dict[str, EngineJob]:
        """How jobs ended that had not when the controller last listed them."""
        handles = [job.handle for job in missing.values()]
        found = (job for job in self._access.ended(handles=handles) if job.has_ended and job.name in missing)
        ended = self._described(job for job in found if missing[job.name].handle == str(job.job_id))
        words = "Slurm has forgotten the job, and has no accounting that says how it ended"
        for name, job in missing.items():
            loss = Loss(reason=Reason.WORKER_LOST, message=words)
            ended.setdefault(name, replace(job, phase=EnginePhase.ENDED, message=words, loss=loss))
        return ended
