"""How a job ended, and whose fault it was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainmaster.cli.human_units import duration
from trainmaster.cli.progress import losses, steps
from trainmaster.client.training_files import TRAINER

if TYPE_CHECKING:
    from trainmaster.client.types import Failure, Job

_PLACE = re.compile(r'File "[^"]*", line \d+(?:, in [^:]+)?')


def ending(job: Job) -> list[str]:
    """A few lines about a job that came to rest. The first begins with its status."""
    facts = [
        f"after {duration(job['runtime_seconds'])}" if job["runtime_seconds"] >= 0.1 else "",
        f"step {steps(job)}" if steps(job) else "",
        *losses(job),
        f"checkpoint {job['latest_checkpoint_id']}" if job["latest_checkpoint_id"] else "",
    ]
    lines = [f"{job['status']} {' · '.join(fact for fact in facts if fact)}".rstrip()]
    if failure := job["error"]:
        lines += failure_lines(failure)
    elif job["status"] == "CANCELLED" and job["status_message"]:
        lines.append(f"  {job['status_message']}")
    if job["status"] == "COMPLETED" and job["kind"] == TRAINER:
        lines.append(f"  Fetch the model with `trainmaster download {job['job_id']} model`.")
    return lines


def failure_lines(failure: Failure) -> Iterator[str]:
    """What went wrong, where, and what to do."""
    yield f"  {failure['error_type']}: {failure['error_message']}"
    if failure["frame"]:
        # The frame ends with the error, which the message has named already.
        place = _PLACE.match(failure["frame"])
        yield f"  at {place[0] if place else failure['frame']}"
    if failure["fault"] != "none":
        yield f"  fault: {failure['fault']}"
    if failure["advice"]:
        yield f"  {failure['advice'][:1].upper()}{failure['advice'][1:]}."
