"""Reads run directories: turns what workers and ranks wrote into an `AttemptObservation` for the pure core."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainmaster.backends.base import Loss
from trainmaster.protocol import run_directory
from trainmaster.protocol.attempt_files import AttemptFileUrl, FileArea, is_url
from trainmaster.protocol.documents import disk_is_full
from trainmaster.protocol.reasons import Reason, StopCause, exit_record
from trainmaster.protocol.run_directory import RunDirectory
from trainmaster.server.coordinator.launch import checkpoints_homes
from trainmaster.server.coordinator.streams import Streams, note
from trainmaster.server.core import reports
from trainmaster.server.core.job import Attempt, Job, JobProgress
from trainmaster.server.core.reports import AttemptObservation, Liveness, NodeObservation
from trainmaster.server.core.states import Desired
from trainmaster.server.core.workloads.job_class import KIND as JOB_CLASS
from trainmaster.server.core.workloads.trainer_service import KIND as TRAINER_SERVICE
from trainmaster.server.storage import ARTIFACTS, URI, Location, Roots

_OF_RANKS = ("phase", "checkpoint", "capable", "finished", "note", "doing")
"""What a rank may report; only its worker may report anything else."""
_MAX_ETA_S = 1e10
_OVER = (Liveness.GONE, Liveness.REBOOTED, Liveness.REVOKED)
READS_AFTER_END = 8
"""Observations of a node that has ended, while it has more reports than one observation reads: some 2,000 reports of a
single rank. A well-behaved job has a handful left, or a few hundred after the server was away for a day."""
Endpoint = Callable[[int, str, int], str | None]
LossOf = Callable[[int], Loss | None]
LOSS_WITHIN_S = 60.0
"""How long the end of a node that its engine stopped waits for the engine to say why."""
ENGINES_REASONS = frozenset(
    {
        *(Reason.PREEMPTED, Reason.EVICTED, Reason.ENGINE_CANCELLED, Reason.TIMEOUT),
        *(Reason.NODE_LOST, Reason.OUT_OF_MEMORY, Reason.DISK_FULL),
    }
)
"""Why an engine ends ranks: it knows better than a worker that only saw them end by a signal."""
IDENTITY = ("project", "group", "name")
"""What the path of a job class's checkpoints begins with."""


def observe_attempt(
    job: Job,
    directory: RunDirectory,
    liveness: Sequence[Liveness],
    *,
    ranks_per_node: int,
    roots: Roots,
    endpoint: Endpoint,
    loss: LossOf | None = None,
    now: Callable[[], float] = time.time,
) -> AttemptObservation:
    """What is new about the current attempt. `liveness`, one for each node, must have been taken before the call: a
    worker that was found gone has written all it ever will, so nothing is missed here. `endpoint` tells from a node,
    and the host and port that its worker names, where its service is reached. On the engine of a cluster,
    `loss` tells why the worker of a node is gone."""
    streams = Streams(directory, job.live, count=len(liveness) * (1 + ranks_per_node))
    nodes = [
        _observe_node(job, directory, node, alive, ranks_per_node, streams, roots, endpoint)
        for node, alive in enumerate(liveness)
    ]
    if loss is not None:
        of_gang = len(nodes) > 1
        nodes = [_told_by_engine(seen, node, loss, now, of_gang=of_gang) for node, seen in enumerate(nodes)]
    if streams.skipped_bytes:
        message = (
            f"the attempt ended with more reports than the server had read: {streams.skipped_bytes} bytes of "
            "them were skipped, up to the newest; checkpoints and phases that they report are not registered"
        )
        nodes[0] = replace(nodes[0], records=[*nodes[0].records, {"type": "reports_cut", "message": message}])
    # After the exit of node 0 was looked for: they are complete when that is there.
    metrics = streams.newest(run_directory.metrics_stream(0, 0))
    return AttemptObservation(
        attempt=job.live.number,
        nodes=nodes,
        offsets=streams.offsets,
        progress=_progress(job.progress, metrics),
        behind=streams.behind,
    )


def last_beat(attempt: Attempt, directory: RunDirectory) -> float | None:
    """The last heartbeat of an attempt's workers, of the one that has been silent for longest."""
    times = []
    for node in range(len(attempt.shares)):
        if node not in attempt.exits:
            with contextlib.suppress(OSError):  # no sign of life, as without the file
                beat = directory.document(run_directory.beat_document(node)) or {}
                times.append(reports.number(beat.get("t")) or 0.0)
    return min(times, default=None)


def _observe_node(
    job: Job,
    directory: RunDirectory,
    node: int,
    alive: Liveness,
    ranks_per_node: int,
    streams: Streams,
    roots: Roots,
    reached: Endpoint,
) -> NodeObservation:
    attempt = job.live
    # The exit is written last: read it before the streams, and they are complete when it is there.
    ended = directory.document(run_directory.exit_document(node)) if node not in attempt.exits else None
    own = [
        run_directory.worker_stream(node),
        *(run_directory.events_stream(node, rank) for rank in _ranks(node, ranks_per_node)),
    ]
    said = [streams.fresh(stream, of_rank=stream != own[0]) for stream in own]
    over = ended is not None or alive in _OVER
    if over and any(each.behind for each in said):
        # Its end would cut off earlier reports: they are read first, but not for long, as others wait for its node.
        wanted = job.desired not in (Desired.STOP, Desired.DELETE)
        if streams.reads_on_after_end(node, reads=READS_AFTER_END if wanted else 0):
            ended, alive = None, Liveness.UNKNOWN
        else:
            said = [
                streams.skip_to_newest(stream, each) if each.behind else each
                for stream, each in zip(own, said, strict=True)
            ]
    streams.behind |= any(each.behind for each in said)
    notes = [each for of_stream in said for each in of_stream.notes]
    # Only ranks report checkpoints, because the place of a rank's checkpoint is checked below.
    records = [record for record in said[0].records if record.get("type") != "checkpoint"]
    for rank, of_rank in zip(_ranks(node, ranks_per_node), said[1:], strict=True):
        found = (_located(record, rank, roots, job) for record in of_rank.records)
        records += [located for located in found if located is not None]
    records.sort(key=lambda record: reports.number(record.get("t")) or 0.0)
    endpoint = None
    # Over HTTP the document may arrive after the report about it.
    unknown = node in attempt.started and job.endpoint is None
    if job.is_service and (unknown or any(record.get("type") == "ready" for record in records)):
        endpoint = _endpoint(directory, node, reached)
    if ended is None and alive is Liveness.GONE and disk_is_full(directory.path):
        message = f"the worker of node {node} died without a report, and the disk of its run directory is full"
        ended = {"reason": Reason.DISK_FULL, "message": message}
    return NodeObservation(liveness=alive, records=records + notes, exit=ended, endpoint=endpoint)


def _told_by_engine(
    seen: NodeObservation, node: int, loss: LossOf, now: Callable[[], float], *, of_gang: bool
) -> NodeObservation:
    """With the engine's reason for an end that the worker cannot explain: it died, or the engine ended its ranks."""
    ended = seen.exit
    if ended is None and seen.liveness is not Liveness.GONE:
        return seen
    if ended is not None and not _by_engine(ended):
        return seen
    if (told := loss(node)) is None:
        recent = ended is not None and now() - (reports.number(ended.get("ended_at")) or 0.0) < LOSS_WITHIN_S
        # The engine says why once all of the job has ended.
        return replace(seen, exit=None, liveness=Liveness.UNKNOWN) if recent else seen
    if ended is None:
        return replace(seen, exit=exit_record(told.reason, told.message))
    if ended.get("stop_cause") == StopCause.ENGINE and told.if_stopped is not None:
        told = told.if_stopped
    if told.reason in ENGINES_REASONS:
        return replace(seen, exit={**ended, "reason": told.reason, "message": told.message})
    if ended.get("stop_cause") == StopCause.ENGINE or (of_gang and ended.get("signal") == "SIGTERM"):
        # It ended what another node of the gang had left.
        broken = {"reason": Reason.WORKER_LOST, "stop_cause": StopCause.PEER, "message": told.message}
        return replace(seen, exit={**ended, **broken})
    return seen


def _by_engine(ended: Mapping[str, Any]) -> bool:
    """Whether the engine may have ended a node: it told the worker to stop, or a signal killed a rank."""
    stopped_by = ended.get("stop_cause")
    return stopped_by == StopCause.ENGINE or (stopped_by is None and ended.get("reason") == Reason.KILLED_BY_SIGNAL)


def _ranks(node: int, ranks_per_node: int) -> range:
    return range(node * ranks_per_node, (node + 1) * ranks_per_node)


def _endpoint(directory: RunDirectory, node: int, reached: Endpoint) -> str | None:
    """host:port of a service, once its worker reports that it answers. The gateway sends requests there in the server's
    name, so the backend decides: a worker must not direct it to other machines that the server can reach."""
    if (told := directory.document(run_directory.endpoint_document(node))) is None:
        return None
    port = reports.whole(told.get("port"), low=1, high=65535)
    return reached(node, str(told.get("host")), port) if port is not None else None


def _located(record: dict[str, Any], rank: int, roots: Roots, job: Job) -> dict[str, Any] | None:
    """A rank's record as the core expects it; phases count from rank 0 only."""
    match record.get("type"):
        case "phase" if rank != 0:
            return None
        case "checkpoint":
            try:
                location = _own_checkpoint(reports.exact_text(record.get("path")), job, roots)
            except ValueError as error:
                return note(f"a checkpoint was not registered: {error}", record.get("t"))
            return {**record, "root": location.root, "path": location.path}
        case kind if kind in _OF_RANKS:
            return record
        case _:
            return None


def _own_checkpoint(path: str, job: Job, roots: Roots) -> Location:
    """Where a checkpoint lies: in its job's directory for them, or on an object store, which is never accessed. It is
    shown, fetched and removed with the server's rights: it must not be another job's, nor lie behind a link."""
    if path.startswith("s3://") and not roots.stores(path):
        return Location(root=URI, path=path)
    location = _sent(path, job, roots) if is_url(path) and not roots.stores(path) else roots.locate(path)
    home = next((home for home in checkpoints_homes(job) if location.path.startswith(f"{home}/")), None)
    names = location.path.removeprefix(f"{home}/").split("/") if home else []
    own = len(names) == 1
    if job.workload_kind == JOB_CLASS:
        # All job classes of an account share a directory; a class owns what lies below its project, group and name.
        own = len(names) > len(IDENTITY)
    elif job.workload_kind == TRAINER_SERVICE:
        # Sorted by purpose, and by the names that clients give them.
        own = len(names) >= 1
    if location.root != ARTIFACTS or not own:
        raise ValueError(f"{path} does not lie in the job's directory for checkpoints")
    return location


def _sent(url: str, job: Job, roots: Roots) -> Location:
    """Where a checkpoint lies that this very attempt has saved over HTTP."""
    named = AttemptFileUrl.parse(url)
    if named is None or named.area is not FileArea.CHECKPOINTS or not named.path:
        raise ValueError(f"{url} is no address of a checkpoint of this server")
    if named.attempt_id != f"{job.job_id}.{job.live.number}":
        raise ValueError(f"{url} is the address of another attempt")
    places = [Location(root=ARTIFACTS, path=f"{home}/{named.path}") for home in checkpoints_homes(job)]
    for place in places:
        roots.path(place.root, place.path)  # raises if it leads out
    return next((place for place in places if roots.exists(place)), places[0])


def _progress(progress: JobProgress, records: Iterable[Mapping[str, Any]]) -> JobProgress | None:
    """The last values of rank 0's metrics; None when there is nothing new."""
    latest = None
    for record in records:
        latest = _advanced(latest or progress, record)
    return latest


def _advanced(progress: JobProgress, record: Mapping[str, Any]) -> JobProgress:
    """Progress after one more report; values that are missing or malformed stay."""

    told: dict[str, float | None] = {
        "step": reports.whole(record.get("step")),
        "total_steps": reports.whole(record.get("total_steps")),
        "epoch": reports.number(record.get("epoch")),
        "percent": reports.number(record.get("percent"), low=0.0, high=100.0),
        "eta_s": reports.number(record.get("eta_s"), low=0.0, high=_MAX_ETA_S),
    }
    known: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
    step, total = known.get("step", progress.step), known.get("total_steps", progress.total_steps)
    if told["percent"] is None and step is not None and total:
        known["percent"] = min(100.0, 100.0 * step / total)
    if step != progress.step and (at := reports.number(record.get("t"))) is not None:
        known["step_at"] = at
    return replace(progress, **known, metrics=_merged(progress.metrics, reports.metrics(record.get("values"))))


def _merged(before: Mapping[str, float], told: Mapping[str, float]) -> dict[str, float]:
    """The last value of each metric; of too many, the oldest go that are not reported again."""
    merged = {**before, **told}
    surplus = len(merged) - reports.MAX_METRICS
    if surplus > 0:
        for name in [name for name in merged if name not in told][:surplus]:
            del merged[name]
    return merged
