"""Exit documents of nodes whose worker could not write one: it died without a word, or was never started."""

from __future__ import annotations

import time
from typing import Any

from trainmaster.protocol.documents import DISK_FULL_ERRNOS, disk_is_full, read_lines
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.run_directory import CONTROL, RunDirectory, worker_stream


def of_lost_worker(directory: RunDirectory, node: int, end: str) -> dict[str, Any]:
    """For a worker of which only its end is known, such as `was killed by SIGKILL`, and what it wrote before."""
    records, _ = read_lines(directory.read(worker_stream(node), 0))
    started = [record["t"] for record in records if record.get("type") == "started"]
    steps = [record["step"] for record in records if record.get("type") == "step_started"]
    reason, message = Reason.WORKER_LOST, f"the worker of node {node} {end} without reporting an end"
    if disk_is_full(directory.path):
        reason, message = Reason.DISK_FULL, f"{message}; the disk of its run directory is full"
    return {
        **_document(reason, message),
        "step": steps[-1] if steps else None,
        "stop_cause": (directory.document(CONTROL) or {}).get("stop"),
        "started_at": started[0] if started else None,
        "streams": dict(directory.streams()),
    }


def of_unprepared_node(error: OSError) -> dict[str, Any]:
    """For a node where nothing could be laid out that a worker needs."""
    reason = Reason.DISK_FULL if error.errno in DISK_FULL_ERRNOS else Reason.STORAGE_UNAVAILABLE
    return _document(reason, f"the node could not prepare for the job: {error}")


def _document(reason: Reason, message: str) -> dict[str, Any]:
    return {
        "reason": reason,
        "message": message,
        "exit_code": None,
        "signal": None,
        "rank": None,
        "step": None,
        "stop_cause": None,
        "started_at": None,
        "ended_at": time.time(),
        "evidence": {"last_lines": [], "frame": None, "oom_kills": None},
        "streams": {},
    }
