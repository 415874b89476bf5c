"""When jobs that run will end, and when jobs that wait will start, as far as that can be known."""

from __future__ import annotations

from collections.abc import Callable, Collection

from trainmaster.server.core.job import Job
from trainmaster.server.scheduling.view import ClusterView
from trainmaster.server.scheduling.virtual_time import starts_ahead

MOST_PASSES = 400
"""So far ahead, the scheduler will have decided otherwise long before."""


def expected_end(job: Job) -> float | None:
    """When a job gives back what it holds; None when nobody knows.

    By the end of its grace period if it is being stopped, else by what it says of its progress or by its
    `max_runtime_seconds`, whichever comes first.
    """
    attempt = job.live
    if attempt.stop is not None and attempt.stop_at is not None:
        return attempt.stop_at + attempt.stop_grace_s
    if job.is_service:
        return None
    began = attempt.started_at or attempt.created_at
    known = [] if job.max_runtime_s is None else [began + job.max_runtime_s]
    remaining_s = job.progress.remaining_s
    if remaining_s is not None and job.progress.step_at is not None:
        # What an earlier attempt said counts from the start of this one.
        known.append(max(job.progress.step_at, began) + remaining_s)
    return min(known, default=None)


def estimated_waits(
    view: ClusterView, wanted: Collection[str], *, now: float, patience: Callable[[], bool] = lambda: True
) -> dict[str, float]:
    """How long jobs will still wait if nothing new comes, in seconds, by running the scheduler forward.

    A job is missing where the ends of those before it are not known, or where it would take too long to find out.
    """
    starts = starts_ahead(view, now=now, ends_at=expected_end, wanted=wanted, max_passes=MOST_PASSES, patience=patience)
    return {job_id: max(0.0, start - now) for job_id, start in starts.items() if job_id in wanted}
