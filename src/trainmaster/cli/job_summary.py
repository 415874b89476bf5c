"""A job in a few words: its name, its progress and how it ended."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainmaster.cli.output import duration, number
from trainmaster.client.training_files import TRAINER

if TYPE_CHECKING:
    from trainmaster.client.types import Failure, Job, JobSummary


RATE_WINDOW_S = 15.0
"""Long enough to be steady, short enough to follow a change."""
SHOWN_METRICS = ("loss", "eval_loss")
PREPARED_PERCENT = "prepare_percent"
"""The metric by which a training says how much of its model and data is there."""
PREPARED = 100.0


def title(job: JobSummary) -> str:
    return f"{job['handle'] or job['job_id']} ({job['name']})"


def percent(job: JobSummary) -> float | None:
    """How much of the work, or of the preparation, is done; None where the job does not report it."""
    if job["status"] == "PREPARING":
        return job["metrics"].get(PREPARED_PERCENT)
    progress = job["progress"]
    if progress["percent"] is not None:
        return min(max(progress["percent"], 0.0), 100.0)
    if progress["step"] is not None and progress["total_steps"]:
        return min(100.0 * progress["step"] / progress["total_steps"], 100.0)
    return None


def steps(job: JobSummary) -> str:
    progress = job["progress"]
    if progress["step"] is None:
        return ""
    return f"{progress['step']}/{progress['total_steps']}" if progress["total_steps"] else str(progress["step"])


def brief(job: JobSummary) -> str:
    done = percent(job)
    if job["status"] == "PREPARING":
        return f"{done:.0f}% prepared" if done is not None else ""
    return " ".join(part for part in (f"{done:.0f}%" if done is not None else "", steps(job)) if part)


def losses(job: JobSummary) -> list[str]:
    return [f"{name} {number(job['metrics'][name])}" for name in SHOWN_METRICS if name in job["metrics"]]


class StepRate:
    """Steps per second over the last seconds of watching."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def see(self, job: Job) -> None:
        step, now = job["progress"]["step"], time.monotonic()
        if step is None:
            return
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()  # a new attempt went back to a checkpoint
        self._seen.append((now, step))
        while now - self._seen[0][0] > RATE_WINDOW_S:
            self._seen.popleft()

    @property
    def rate(self) -> float | None:
        """Steps a second; None until two different steps were seen."""
        if not self._seen:
            return None
        (then, first), (now, last) = self._seen[0], self._seen[-1]
        return (last - first) / (now - then) if last > first and now > then else None

    def eta(self, job: Job) -> str:
        progress = job["progress"]
        if progress["eta_seconds"] is not None:
            return duration(int(progress["eta_seconds"]))
        if self.rate and progress["total_steps"] and progress["step"] is not None:
            return duration(int(max(progress["total_steps"] - progress["step"], 0) / self.rate))
        return ""


def sentence(job: Job, pace: StepRate) -> str:
    """What a watcher wants to know, after the status and the bar."""
    if job["status"] in ("PENDING", "QUEUED"):
        return _waiting(job)
    attempt = f"attempt {job['attempt']}" if job["attempt"] > 1 else ""
    if job["status"] == "SCHEDULING":
        return " · ".join(part for part in (attempt, job["status_message"]) if part)
    if job["status"] == "PREPARING":
        # What comes after the preparation may take minutes with a large model, and has no percents.
        loads = "all is there; the processes start and load the model" if percent(job) == PREPARED else ""
        return " · ".join(part for part in (attempt, loads or job["status_message"]) if part)
    # An export comes after the last step, and nothing tells how long it takes.
    stepping = job["status"] != "EXPORTING"
    rate, eta = (pace.rate, pace.eta(job)) if stepping else (None, "")
    parts = [
        attempt,
        f"step {steps(job)}" if steps(job) else "",
        f"{rate:.3g} steps/s" if rate else "",
        f"ETA {eta}" if eta else "",
        *losses(job),
        "stalled" if job["stalled"] else "",
    ]
    return " · ".join(part for part in parts if part)


def _waiting(job: Job) -> str:
    wait = job["estimated_wait_seconds"]
    parts = [
        f"number {job['queue_position']} in queue {job['queue']}" if job["queue_position"] else "",
        job["pending_reason"] or "",
        f"about {duration(wait)}" if wait is not None else "",
    ]
    return " · ".join(part for part in parts if part)


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
    yield f"  {failure['error_type']}: {failure['error_message']}"
    if failure["frame"]:
        # The frame ends with the error, which the message has named already.
        place = _PLACE.match(failure["frame"])
        yield f"  at {place[0] if place else failure['frame']}"
    if failure["fault"] != "none":
        yield f"  fault: {failure['fault']}"
    if failure["advice"]:
        yield f"  {failure['advice'][:1].upper()}{failure['advice'][1:]}."
