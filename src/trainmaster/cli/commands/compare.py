"""`trainmaster compare`: what came out of several jobs, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from trainmaster.cli.commands.diff import shown
from trainmaster.cli.exits import UsageError
from trainmaster.cli.human_units import duration, number
from trainmaster.cli.options import JobsArgument, JsonOption, job_id_of
from trainmaster.cli.output import draw, print_json, table
from trainmaster.cli.progress import PREPARED_PERCENT, steps
from trainmaster.cli.session import connect

if TYPE_CHECKING:
    from trainmaster.cli.request_diff import Difference
    from trainmaster.client.types import Job


def run(jobs: JobsArgument, as_json: JsonOption = False) -> None:
    """Show the last metrics of several jobs side by side, and the fields in which their requests differ."""
    from trainmaster.cli.request_diff import differences

    if len(jobs) < 2:
        raise UsageError("name at least two jobs to compare")
    with connect() as client:
        found = [client.get(job_id_of(client, name)) for name in jobs]
    differ = differences(found)
    if as_json:
        fields = ("job_id", "handle", "name", "status", "runtime_seconds", "progress", "metrics")
        compared = [{field: dict(job)[field] for field in fields} for job in found]
        print_json({"jobs": compared, "differences": [asdict(each) for each in differ]})
        return
    from rich.text import Text

    headings = ("", *(job["handle"] or job["job_id"] for job in found))
    rows = [tuple(map(Text, row)) for row in _rows(found, differ)]
    draw(table(headings, rows, wrap=headings[1:]))


def _rows(jobs: Sequence[Job], differ: Sequence[Difference]) -> Iterator[tuple[str, ...]]:
    yield ("name", *(job["name"] for job in jobs))
    yield ("status", *(job["status"] for job in jobs))
    yield ("ran", *(duration(job["runtime_seconds"]) for job in jobs))
    if any(steps(job) for job in jobs):
        yield ("step", *(steps(job) for job in jobs))
    for name in dict.fromkeys(name for job in jobs for name in job["metrics"] if name != PREPARED_PERCENT):
        yield (name, *(number(job["metrics"][name]) if name in job["metrics"] else "–" for job in jobs))
    for each in differ:
        yield (each.field, *map(shown, each.values))
