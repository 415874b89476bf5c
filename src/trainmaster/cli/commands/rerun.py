"""`trainmaster rerun`: run jobs again from the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmaster.cli.bulk import for_each
from trainmaster.cli.options import JobsArgument, JsonOption

if TYPE_CHECKING:
    from trainmaster.client import Client
    from trainmaster.client.types import Job


def run(jobs: JobsArgument, as_json: JsonOption = False) -> None:
    """Run jobs again from the start, each as a new job with the same request. They may be in any state.

    `retry` goes on from the checkpoint of a job that failed; `clone` runs a changed copy.
    """
    for_each(jobs, _again, lambda _: "is submitted, and runs from the start", as_json=as_json)


def _again(client: Client, job: str) -> Job:
    return client.get(client.clone(job)["job_id"])
