"""Writing down what a server's jobs were, so that they can be simulated."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster.cli.exits import CommandError
from trainmaster.cli.formatting import seconds_between

if TYPE_CHECKING:
    from trainmaster.sdk import Client
    from trainmaster.sdk.types import Job

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "PREEMPTED")


def record_jobs(client: Client, path: Path, *, limit: int | None) -> int:
    """Write the jobs that ran and ended, the newest `limit` of them, as a trace; how many there were.

    What a job ran for is taken for its duration: nobody knows what a cancelled one still had to do.

    Raises:
        CommandError: there are none, or the file cannot be written.
    """
    summaries = itertools.islice((job for job in client.list(statuses=ENDED) if job["runtime_seconds"] > 0), limit)
    jobs = sorted((client.get(job["job_id"]) for job in summaries), key=lambda job: job["created_at"])
    if not jobs:
        raise CommandError("no job has run and ended yet: there is nothing to record")
    lines = [json.dumps(_line(job, jobs[0]["created_at"]), ensure_ascii=False) + "\n" for job in jobs]
    half = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        half.write_text("".join(lines))
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    return len(jobs)


def _line(job: Job, first: str) -> dict[str, Any]:
    """The line of a recorded trace; see `trainmaster.scheduling.traces`."""
    resources, scheduling = job["resource_config"], job["scheduling_config"]
    nodes = resources["node_count"]
    asked = resources["gpu_count"]
    # Where the job left it to the server, what it got is what it needs.
    gpus = asked if asked is not None else round(job["gpu_seconds"] / job["runtime_seconds"])
    line = {
        "name": job["name"],
        "arrival_s": round(seconds_between(first, job["created_at"]), 3),
        "duration_s": round(job["runtime_seconds"], 3),
        "gpus": gpus // nodes,
        "nodes": nodes,
        "gpu_type": resources["gpu_type"],
        "gpu_memory_min_mb": resources["gpu_memory_min_mb"],
        "cpu_cores": resources["cpu_cores"],
        "ram_mb": resources["ram_min_mb"],
        "storage_mb": resources["storage_min_mb"],
        "capabilities": scheduling["required_capabilities"],
        "affinity": resources["node_affinity"],
        "anti_affinity": resources["node_anti_affinity"],
        "priority": job["priority"],
        "queue": job["queue"],
        "preemptible": scheduling["preemptible"],
        "max_retries": job["max_retries"],
        "max_runtime_s": scheduling["max_runtime_seconds"],
        "class": job["labels"].get("class", ""),
    }
    return {name: value for name, value in line.items() if value not in (None, [], "")}
