"""Reading run directories: from what workers and ranks wrote to a `Sight` for the pure core."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainmaster.core.job import Attempt, Job, Progress
from trainmaster.core.sight import Liveness, NodeSight, Sight
from trainmaster.protocol.rundir import (
    RunDirectory,
    endpoint_document,
    events_stream,
    exit_document,
    metrics_stream,
    read_lines,
    worker_stream,
)
from trainmaster.storage import OutsideRootError, Roots


def look(
    job: Job, directory: RunDirectory, liveness: Sequence[Liveness], *, ranks_per_node: int, roots: Roots
) -> Sight:
    """What is new about the current attempt.

    `liveness` must have been taken before the call: a worker that was found gone has written all it
    ever will, so nothing that it said can be missed here.
    """
    attempt = job.live
    offsets: dict[str, int] = {}
    nodes = [
        _look_at_node(job, directory, node, alive, ranks_per_node, offsets, roots)
        for node, alive in enumerate(liveness)
    ]
    progress = _progress(job, directory, attempt, offsets)
    return Sight(attempt=attempt.number, nodes=nodes, offsets={**attempt.offsets, **offsets}, progress=progress)


def _look_at_node(
    job: Job,
    directory: RunDirectory,
    node: int,
    alive: Liveness,
    ranks_per_node: int,
    offsets: dict[str, int],
    roots: Roots,
) -> NodeSight:
    attempt = job.live
    # The exit is written last: read it before the streams, and they are complete when it is there.
    ended = directory.document(exit_document(node)) if node not in attempt.exits else None
    records = _fresh(directory, worker_stream(node), attempt, offsets)
    for local_rank in range(ranks_per_node):
        rank = node * ranks_per_node + local_rank
        reported = _fresh(directory, events_stream(node, rank), attempt, offsets)
        records += [located for record in reported if (located := _located(record, rank, roots)) is not None]
    records.sort(key=_told_at)
    endpoint = None
    if job.is_service and any(record.get("type") == "ready" for record in records):
        document = directory.document(endpoint_document(node))
        endpoint = f"{document['host']}:{document['port']}" if document else None
    return NodeSight(liveness=alive, records=records, exit=ended, endpoint=endpoint)


def _told_at(record: Mapping[str, Any]) -> float:
    told = record.get("t")
    return float(told) if isinstance(told, int | float) else 0.0


def _fresh(directory: RunDirectory, stream: str, attempt: Attempt, offsets: dict[str, int]) -> list[Mapping[str, Any]]:
    """The whole lines that a stream has beyond what was taken in."""
    start = attempt.offsets.get(stream, 0)
    taken: list[Mapping[str, Any]] = []
    while True:
        data = directory.read(stream, start)
        records, length = read_lines(data)
        if not length:
            return taken
        taken += records
        start += length
        offsets[stream] = start


def _located(record: dict[str, Any], rank: int, roots: Roots) -> dict[str, Any] | None:
    """A rank's record as the core wants it; phases count from rank 0 alone."""
    match record.get("type"):
        case "phase" if rank != 0:
            return None
        case "checkpoint":
            try:
                location = roots.locate(str(record["path"]))
            except (KeyError, OutsideRootError) as error:
                return {"type": "note", "t": record.get("t"), "message": f"a checkpoint was not registered: {error}"}
            return {**record, "root": location.root, "path": location.path}
        case _:
            return record


def _progress(job: Job, directory: RunDirectory, attempt: Attempt, offsets: dict[str, int]) -> Progress | None:
    """The last word of rank 0's metrics."""
    records = _fresh(directory, metrics_stream(0, 0), attempt, offsets)
    if not records:
        return None
    progress = job.progress
    for record in records:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            progress = _advanced(progress, record)
    return progress


def _advanced(progress: Progress, record: Mapping[str, Any]) -> Progress:
    step = int(record["step"]) if record.get("step") is not None else progress.step
    total = int(record["total_steps"]) if record.get("total_steps") is not None else progress.total_steps
    percent = float(record["percent"]) if record.get("percent") is not None else None
    if percent is None and step is not None and total:
        percent = min(100.0, 100.0 * step / total)
    values = {name: float(value) for name, value in dict(record.get("values") or {}).items()}
    return replace(
        progress,
        step=step,
        total_steps=total,
        epoch=float(record["epoch"]) if record.get("epoch") is not None else progress.epoch,
        percent=percent if percent is not None else progress.percent,
        eta_s=float(record["eta_s"]) if record.get("eta_s") is not None else progress.eta_s,
        metrics={**progress.metrics, **values},
        step_at=(_told_at(record) or progress.step_at) if step != progress.step else progress.step_at,
    )
