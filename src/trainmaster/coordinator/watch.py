"""Reading run directories: from what workers and ranks wrote to a `Sight` for the pure core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainmaster.coordinator.launching import checkpoints_home
from trainmaster.core import reported
from trainmaster.core.job import Attempt, Job, Progress
from trainmaster.core.sight import Liveness, NodeSight, Sight
from trainmaster.core.workloads.job_class import KIND as JOB_CLASS
from trainmaster.core.workloads.trainer_service import KIND as TRAINER_SERVICE
from trainmaster.protocol.rundir import (
    RunDirectory,
    endpoint_document,
    events_stream,
    exit_document,
    metrics_stream,
    read_lines,
    worker_stream,
)
from trainmaster.storage import ARTIFACTS, URI, Location, Roots

LONGEST_LINE = 1 << 20
"""A longer one is passed over: no report needs it, and one must not stop all that come after it."""
LOOK_BYTES = 64 * LONGEST_LINE
"""What is read of a stream in one look: one job must not hold up every other."""
MOST_BYTES = 1024 * LONGEST_LINE
"""What is ever read of a stream; nobody reports more, but for somebody who means harm."""
_OF_RANKS = ("phase", "checkpoint", "capable", "finished", "note", "doing")
"""What a rank may report; everything else is its worker's to say."""
_MAX_ETA_S = 1e10
Endpoint = Callable[[int, str, int], str | None]
IDENTITY = ("project", "group", "name")
"""What the path of a job class's checkpoints begins with."""


def look(
    job: Job,
    directory: RunDirectory,
    liveness: Sequence[Liveness],
    *,
    ranks_per_node: int,
    roots: Roots,
    endpoint: Endpoint,
) -> Sight:
    """What is new about the current attempt.

    Args:
        job: whose attempt it is.
        directory: its run directory.
        liveness: of each node.
        ranks_per_node: how many report.
        roots: where checkpoints may lie.
        endpoint: tells from a node, and the host and port that its worker names, where its service is reached.

    `liveness` must have been taken before the call: a worker that was found gone has written all it
    ever will, so nothing that it said can be missed here.
    """
    streams = _Streams(directory, job.live)
    nodes = [
        _look_at_node(job, directory, node, alive, ranks_per_node, streams, roots, endpoint)
        for node, alive in enumerate(liveness)
    ]
    # After the exit of node 0 was looked for: they are complete when that is there.
    metrics, passed_over = streams.fresh(metrics_stream(0, 0))
    nodes[0] = replace(nodes[0], records=[*nodes[0].records, *passed_over])
    return Sight(
        attempt=job.live.number, nodes=nodes, offsets=streams.offsets, progress=_progress(job.progress, metrics)
    )


class _Streams:
    """Reads streams on from where they were taken in, and remembers how far it came."""

    def __init__(self, directory: RunDirectory, attempt: Attempt) -> None:
        self._directory = directory
        self.offsets = dict(attempt.offsets)
        self.behind = False
        """There is more than one look takes in."""

    def fresh(self, stream: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The whole lines that a stream has beyond what was taken in, and a note on each that was passed over."""
        start = self.offsets.get(stream, 0)
        until = min(start + LOOK_BYTES, MOST_BYTES)
        records: list[dict[str, Any]] = []
        notes: list[dict[str, Any]] = []
        while start < until:
            # One byte back: unless it ends a line, this is the middle of one that is being passed over.
            back = 1 if start else 0
            data = self._directory.read(stream, start - back, back + LONGEST_LINE)
            unread = data[back:]
            if back and data[:1] != b"\n":
                length = unread.find(b"\n") + 1 or len(unread)
            else:
                found, length = read_lines(unread)
                records += found
                if not length and len(unread) == LONGEST_LINE:
                    length = len(unread)
                    notes.append(_note(f"a report of more than {LONGEST_LINE} bytes was passed over, in {stream}"))
            if not length:
                return records, notes
            start += length
            self.offsets[stream] = start
            if start >= MOST_BYTES:
                notes.append(_note(f"more than {MOST_BYTES} bytes were reported; the rest is ignored, in {stream}"))
        self.behind |= start < MOST_BYTES
        return records, notes


def _look_at_node(
    job: Job,
    directory: RunDirectory,
    node: int,
    alive: Liveness,
    ranks_per_node: int,
    streams: _Streams,
    roots: Roots,
    reached: Endpoint,
) -> NodeSight:
    attempt = job.live
    # The exit is written last: read it before the streams, and they are complete when it is there.
    ended = directory.document(exit_document(node)) if node not in attempt.exits else None
    said_by_worker, notes = streams.fresh(worker_stream(node))
    # It is ranks who tell of checkpoints, and where those lie is looked into: nobody else gets past that.
    records = [record for record in said_by_worker if record.get("type") != "checkpoint"]
    for local_rank in range(ranks_per_node):
        rank = node * ranks_per_node + local_rank
        said, passed_over = streams.fresh(events_stream(node, rank))
        records += [located for record in said if (located := _located(record, rank, roots, job)) is not None]
        notes += passed_over
    records.sort(key=lambda record: reported.number(record.get("t")) or 0.0)
    endpoint = None
    # Over HTTP the document may arrive after the word that it is there.
    unknown = node in attempt.started and job.endpoint is None
    if job.is_service and (unknown or any(record.get("type") == "ready" for record in records)):
        endpoint = _endpoint(directory, node, reached)
    if streams.behind:
        # Its end would cut off what it said before; that is taken in first.
        ended, alive = None, Liveness.UNKNOWN
    return NodeSight(liveness=alive, records=records + notes, exit=ended, endpoint=endpoint)


def _endpoint(directory: RunDirectory, node: int, reached: Endpoint) -> str | None:
    """host:port of a service, once its worker says that it answers.

    The gateway sends requests there in the server's name. So it is the backend that knows where: a worker must not lead
    it to others whom the server can reach.
    """
    told = directory.document(endpoint_document(node))
    if told is None:
        return None
    port = reported.whole(told.get("port"), low=1, high=65535)
    return reached(node, str(told.get("host")), port) if port is not None else None


def _located(record: dict[str, Any], rank: int, roots: Roots, job: Job) -> dict[str, Any] | None:
    """A rank's record as the core wants it; phases count from rank 0 alone."""
    match record.get("type"):
        case "phase" if rank != 0:
            return None
        case "checkpoint":
            try:
                location = _own_checkpoint(reported.exact_text(record.get("path")), job, roots)
            except ValueError as error:
                return _note(f"a checkpoint was not registered: {error}", record.get("t"))
            return {**record, "root": location.root, "path": location.path}
        case kind if kind in _OF_RANKS:
            return record
        case _:
            return None


def _own_checkpoint(path: str, job: Job, roots: Roots) -> Location:
    """Where a checkpoint lies: in its job's directory for them, or on an object store.

    What is registered is shown, fetched and removed with the rights of the server, on the word of the job. So it may
    be nothing of another's, and nothing behind a link. What lies on an object store is only ever named.
    """
    if path.startswith("s3://"):
        return Location(root=URI, path=path)
    location = roots.locate(path)
    home = f"{checkpoints_home(job)}/"
    names = location.path.removeprefix(home).split("/") if location.path.startswith(home) else []
    own = len(names) == 1
    if job.workload_kind == JOB_CLASS:
        # All classes of an account share a directory; their own are those below project, group and name.
        own = len(names) > len(IDENTITY)
    elif job.workload_kind == TRAINER_SERVICE:
        # By what they are for, and by the names that clients give them.
        own = len(names) >= 1
    if location.root != ARTIFACTS or not own:
        raise ValueError(f"{path} does not lie in the job's directory for checkpoints")
    return location


def _note(message: str, at: object = None) -> dict[str, Any]:
    return {"type": "note", "t": at, "message": message}


def _progress(progress: Progress, records: Iterable[Mapping[str, Any]]) -> Progress | None:
    """The last word of rank 0's metrics; None when it said nothing new."""
    latest = None
    for record in records:
        latest = _advanced(latest or progress, record)
    return latest


def _advanced(progress: Progress, record: Mapping[str, Any]) -> Progress:
    """Progress after one more report; what it does not say, or nobody could understand, stays."""

    def or_before(told: float | None, before: float | None) -> float | None:
        return before if told is None else told

    step, total = reported.whole(record.get("step")), reported.whole(record.get("total_steps"))
    step = progress.step if step is None else step
    total = progress.total_steps if total is None else total
    percent = reported.number(record.get("percent"), low=0.0, high=100.0)
    if percent is None and step is not None and total:
        percent = min(100.0, 100.0 * step / total)
    return replace(
        progress,
        step=step,
        total_steps=total,
        epoch=or_before(reported.number(record.get("epoch")), progress.epoch),
        percent=or_before(percent, progress.percent),
        eta_s=or_before(reported.number(record.get("eta_s"), low=0.0, high=_MAX_ETA_S), progress.eta_s),
        metrics=_merged(progress.metrics, reported.metrics(record.get("values"))),
        step_at=or_before(reported.number(record.get("t")), progress.step_at)
        if step != progress.step
        else progress.step_at,
    )


def _merged(before: Mapping[str, float], told: Mapping[str, float]) -> dict[str, float]:
    """The last value of each name; of too many names, those go that were known longest and are not told again."""
    merged = {**before, **told}
    surplus = len(merged) - reported.MAX_METRICS
    if surplus > 0:
        for name in [name for name in merged if name not in told][:surplus]:
            del merged[name]
    return merged
