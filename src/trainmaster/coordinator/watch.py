"""Reading run directories: from what workers and ranks wrote to a `Sight` for the pure core."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainmaster.coordinator.launching import checkpoints_homes
from trainmaster.core import reported
from trainmaster.core.job import Attempt, Job, Progress
from trainmaster.core.sight import Liveness, NodeSight, Sight
from trainmaster.core.states import Desired
from trainmaster.core.workloads.job_class import KIND as JOB_CLASS
from trainmaster.core.workloads.trainer_service import KIND as TRAINER_SERVICE
from trainmaster.protocol.disks import disk_is_full
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.rundir import (
    RunDirectory,
    beat_document,
    endpoint_document,
    events_stream,
    exit_document,
    metrics_stream,
    parse_lines,
    worker_stream,
)
from trainmaster.storage import ARTIFACTS, URI, Location, Roots

LONGEST_LINE = 1 << 20
"""A longer line is skipped: no report needs it, and it must not block the lines after it."""
LOOK_LINES = 512
"""Lines that one look takes from all event streams of an attempt together: other jobs wait meanwhile."""
LEAST_LINES = 16
"""Lines that each stream gets in one look, however many streams share it."""
MOST_OF_LOOK = 2048
"""After this many lines a look starts no further stream; a later look goes on there."""
LOOK_S = 0.2
"""After this time, neither."""
MOST_LINES = 50_000
"""Lines that are ever taken from one event stream of an attempt: each may become a row of the database."""
MOST_BYTES = 64 * LONGEST_LINE
"""Bytes that are ever read from one event stream of an attempt."""
MOST_OF_RANKS = 4
"""Of all ranks of an attempt together, this many times the limits of one stream: a job may have thousands of ranks."""
METRICS_BYTES = 1 << 20
METRICS_LINES = 1000
"""The newest part of the metrics that one look parses. A job shows last values only; the series is read from the file
itself."""
_RANKS_LINES, _RANKS_BYTES = "#lines", "#bytes"
"""The keys, beside the offsets of streams, for what was taken from the streams of all ranks."""
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
    streams = _Streams(directory, job.live, count=len(liveness) * (1 + ranks_per_node))
    nodes = [
        _look_at_node(job, directory, node, alive, ranks_per_node, streams, roots, endpoint)
        for node, alive in enumerate(liveness)
    ]
    # After the exit of node 0 was looked for: they are complete when that is there.
    metrics = streams.newest(metrics_stream(0, 0))
    return Sight(
        attempt=job.live.number,
        nodes=nodes,
        offsets=streams.offsets,
        progress=_progress(job.progress, metrics),
        behind=streams.behind,
    )


def last_beat(attempt: Attempt, directory: RunDirectory) -> float | None:
    """When the workers of an attempt last said that they live: the time of the one that has been silent for longest."""
    times = []
    for node in range(len(attempt.shares)):
        if node not in attempt.exits:
            with contextlib.suppress(OSError):  # no sign of life, as without the file
                beat = directory.document(beat_document(node)) or {}
                times.append(reported.number(beat.get("t")) or 0.0)
    return min(times, default=None)


class _Streams:
    """Reads streams on from where the last look stopped, within the limits of one look."""

    def __init__(self, directory: RunDirectory, attempt: Attempt, *, count: int) -> None:
        self._directory = directory
        self._lines_each = max(LOOK_LINES // count, LEAST_LINES)
        self._deadline = time.monotonic() + LOOK_S
        self.offsets = dict(attempt.offsets)
        self._taken = 0
        self.behind = False
        """Some stream has more than this look took."""

    def fresh(self, stream: str, *, of_rank: bool) -> _Fresh:
        """The next lines of an event stream, and a note on each that was skipped."""
        start, taken = self.offsets.get(stream, 0), self.offsets.get(_lines_of(stream), 0)
        room = MOST_LINES - taken
        if of_rank:
            room = min(room, MOST_OF_RANKS * MOST_LINES - self.offsets.get(_RANKS_LINES, 0))
        all_bytes = self.offsets.get(_RANKS_BYTES, 0)
        if start >= MOST_BYTES or not room or (of_rank and all_bytes >= MOST_OF_RANKS * MOST_BYTES):
            return _NOTHING
        if time.monotonic() > self._deadline or self._taken >= MOST_OF_LOOK:
            status = self._directory.status(stream)
            behind = status is not None and status.st_size > start
            self.behind |= behind
            return _Fresh(behind=behind)
        # One byte back: unless it ends a line, this is the middle of one that is being skipped.
        back = 1 if start else 0
        data = self._directory.read(stream, start - back, back + LONGEST_LINE)
        unread = data[back:]
        lines: list[bytes] = []
        notes: list[dict[str, Any]] = []
        if back and data[:1] != b"\n":
            length = unread.find(b"\n") + 1 or len(unread)
        else:
            *lines, rest = unread.split(b"\n", min(self._lines_each, room))
            length = len(unread) - len(rest)
            if not lines and len(unread) == LONGEST_LINE:
                length = LONGEST_LINE
                notes.append(_note(f"a report of more than {LONGEST_LINE} bytes was skipped, in {stream}"))
        if not length:
            return _NOTHING
        start, taken = start + length, taken + len(lines)
        self._taken += len(lines)
        if of_rank:
            all_bytes += length
            self.offsets[_RANKS_LINES] = self.offsets.get(_RANKS_LINES, 0) + len(lines)
            self.offsets[_RANKS_BYTES] = all_bytes
        if start >= MOST_BYTES or len(lines) >= room or all_bytes >= MOST_OF_RANKS * MOST_BYTES:
            start = max(start, MOST_BYTES)
            notes.append(
                {
                    "type": "reports_cut",
                    "message": f"{stream} has more than {MOST_LINES} lines or {MOST_BYTES >> 20} MiB, or all ranks "
                    f"together have {MOST_OF_RANKS} times as much; the rest of it is ignored, and with it the "
                    "checkpoints and phases that it reports",
                }
            )
        self.offsets[stream], self.offsets[_lines_of(stream)] = start, taken
        behind = start < MOST_BYTES and (len(unread) == LONGEST_LINE or b"\n" in unread[length:])
        self.behind |= behind
        return _Fresh(records=parse_lines(lines), notes=notes, behind=behind)

    def newest(self, stream: str) -> list[dict[str, Any]]:
        """The last lines that a stream has beyond what was read before; earlier ones are skipped."""
        status = self._directory.status(stream)
        start = self.offsets.get(stream, 0)
        if status is None or status.st_size <= start:
            return []
        start = max(start, status.st_size - METRICS_BYTES)
        back = 1 if start else 0
        data = self._directory.read(stream, start - back, back + METRICS_BYTES)
        first = 0 if not back else data.find(b"\n") + 1  # what precedes it is the end of a line that was cut
        end = data.rfind(b"\n") + 1
        if end <= first:
            return []
        self.offsets[stream] = start - back + end
        return parse_lines(data[first : end - 1].rsplit(b"\n", METRICS_LINES)[-METRICS_LINES:])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fresh:
    """What one look takes from one event stream."""

    records: Sequence[dict[str, Any]] = ()
    notes: Sequence[dict[str, Any]] = ()
    behind: bool = False
    """There is more."""


_NOTHING = _Fresh()


def _lines_of(stream: str) -> str:
    """The key, beside a stream's offset, for the number of lines that were taken from it."""
    return f"{stream}#lines"


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
    said = streams.fresh(worker_stream(node), of_rank=False)
    notes, behind = [*said.notes], said.behind
    # It is ranks who tell of checkpoints, and where those lie is looked into: nobody else gets past that.
    records = [record for record in said.records if record.get("type") != "checkpoint"]
    for local_rank in range(ranks_per_node):
        rank = node * ranks_per_node + local_rank
        said = streams.fresh(events_stream(node, rank), of_rank=True)
        records += [located for record in said.records if (located := _located(record, rank, roots, job)) is not None]
        notes += said.notes
        behind |= said.behind
    records.sort(key=lambda record: reported.number(record.get("t")) or 0.0)
    endpoint = None
    # Over HTTP the document may arrive after the word that it is there.
    unknown = node in attempt.started and job.endpoint is None
    if job.is_service and (unknown or any(record.get("type") == "ready" for record in records)):
        endpoint = _endpoint(directory, node, reached)
    if ended is None and alive is Liveness.GONE and disk_is_full(directory.path):
        message = f"the worker of node {node} died without a word, and the disk of its run directory is full"
        ended = {"reason": Reason.DISK_FULL, "message": message}
    if behind and job.desired not in (Desired.STOP, Desired.DELETE):
        # Its end would cut off what it said before; that is taken in first, unless nobody wants the job any more.
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
    home = next((home for home in checkpoints_homes(job) if location.path.startswith(f"{home}/")), None)
    names = location.path.removeprefix(f"{home}/").split("/") if home else []
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
