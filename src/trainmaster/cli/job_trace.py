"""Writing down what a server's jobs were, so that they can be simulated."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.cli.exits import CommandError
from trainmaster.cli.human_units import seconds_between
from trainmaster.server.core.resources import Needs
from trainmaster.server.scheduling.traces import TraceJob, to_line

if TYPE_CHECKING:
    from trainmaster.client import Client
    from trainmaster.client.types import Job

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "PREEMPTED")


def record_jobs(client: Client, path: Path, *, limit: int | None) -> int:
    """Write the jobs that ran and ended, the newest `limit` of them, as a trace; how many there were.

    What a job ran for is taken for its duration: nobody knows what a cancelled one still had to do. Its label
    `class`, if it has one, is its class.

    Raises:
        CommandError: there are none, or the file cannot be written.
    """
    summaries = itertools.islice((job for job in client.list(statuses=ENDED) if job["runtime_seconds"] > 0), limit)
    jobs = sorted((client.get(job["job_id"]) for job in summaries), key=lambda job: job["created_at"])
    if not jobs:
        raise CommandError("no job has run and ended yet: there is nothing to record")
    lines = [to_line(_traced(job, jobs[0]["created_at"])) + "\n" for job in jobs]
    half = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        half.write_text("".join(lines))
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    return len(jobs)


def _traced(job: Job, first: str) -> TraceJob:
    resources, scheduling = job["resource_config"], job["scheduling_config"]
    asked, nodes = resources["gpu_count"], resources["node_count"]
    # Where the job left it to the server, what it got is what it needs.
    gpus = asked if asked is not None else round(job["gpu_seconds"] / job["runtime_seconds"])
    return TraceJob(
        name=job["name"],
        arrival_s=round(seconds_between(first, job["created_at"]), 3),
        duration_s=round(job["runtime_seconds"], 3),
        needs=Needs(
            node_count=nodes,
            gpus_per_node=gpus // nodes,
            gpu_type=resources["gpu_type"],
            gpu_memory_min_mb=resources["gpu_memory_min_mb"] or 0,
            cpu_cores=resources["cpu_cores"] or 0,
            ram_mb=resources["ram_min_mb"] or 0,
            storage_mb=resources["storage_min_mb"] or 0,
            capabilities=tuple(scheduling["required_capabilities"]),
            affinity=tuple(resources["node_affinity"]),
            anti_affinity=tuple(resources["node_anti_affinity"]),
        ),
        priority=job["priority"],
        queue=job["queue"],
        preemptible=scheduling["preemptible"],
        max_retries=job["max_retries"],
        max_runtime_s=scheduling["max_runtime_seconds"],
        class_name=job["labels"].get("class", ""),
    )
