"""Commands that compare jobs: diff for their requests, compare for their results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from trainmaster.cli.exits import UsageError
from trainmaster.cli.human_units import duration, number
from trainmaster.cli.job_summary import PREPARED_PERCENT, steps, title
from trainmaster.cli.options import JobArgument, JobsArgument, JsonOption, connect, job_id_of
from trainmaster.cli.output import draw, print_json, table
from trainmaster.client.types import request_of

if TYPE_CHECKING:
    from trainmaster.client.types import Job


DIGEST_SHOWN = 12
"""Of a file's sha256, enough to tell two apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A field that jobs have different values of; None where a job does not have it."""

    field: str
    values: list[Any]


def differences(jobs: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Every field of the requests in which the jobs differ. Names are left out: they are how jobs are told apart."""
    flat = [fields_of(job) for job in jobs]
    names = dict.fromkeys(name for fields in flat for name in fields if name != "name")
    found = (Difference(field=name, values=[fields.get(name) for fields in flat]) for name in names)
    return [each for each in found if any(value != each.values[0] for value in each.values)]


def fields_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of a job's request that has a value, by its dotted path; a shipped file by its digest."""
    return dict(_flat(request_of(job), ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if value in (None, {}, []):
        return
    match value:
        case {"path": str(name), "sha256": str(digest)}:
            yield path, f"{name} {digest[:DIGEST_SHOWN]}"
        case dict():
            for name, each in value.items():
                yield from _flat(each, f"{path}.{name}" if path else name)
        case list() if all(isinstance(each, dict) for each in value):
            for index, each in enumerate(value):
                key = each.get("path") if "sha256" in each else index
                yield from _flat(each, f"{path}[{key}]")
        case _:
            yield path, value


def diff(first: JobArgument, second: JobArgument, as_json: JsonOption = False) -> None:
    """Show in which fields the requests of two jobs differ: training, data, resources, files and all the rest.

    Values of secrets are not compared. `trainmaster compare` shows what came out of the jobs.
    """
    with connect() as client:
        jobs = [client.get(job_id_of(client, name)) for name in (first, second)]
    found = differences(jobs)
    if as_json:
        print_json({"jobs": [job["job_id"] for job in jobs], "differences": [asdict(each) for each in found]})
    elif found:
        from rich.text import Text

        rows = [(Text(each.field), *(Text(shown(value)) for value in each.values)) for each in found]
        headings = ("FIELD", *(title(job) for job in jobs))
        draw(table(headings, rows, wrap=headings[1:]))
    else:
        typer.echo(f"The requests of {title(jobs[0])} and {title(jobs[1])} do not differ.")


def shown(value: Any) -> str:
    """A value of a field, as a job file would have it."""
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def compare(jobs: JobsArgument, as_json: JsonOption = False) -> None:
    """Show the last metrics of several jobs side by side, and the fields in which their requests differ."""
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
    rows = [tuple(map(Text, row)) for row in _comparison(found, differ)]
    draw(table(headings, rows, wrap=headings[1:]))


def _comparison(jobs: Sequence[Job], differ: Sequence[Difference]) -> Iterator[tuple[str, ...]]:
    yield ("name", *(job["name"] for job in jobs))
    yield ("status", *(job["status"] for job in jobs))
    yield ("ran", *(duration(job["runtime_seconds"]) for job in jobs))
    if any(steps(job) for job in jobs):
        yield ("step", *(steps(job) for job in jobs))
    for name in dict.fromkeys(name for job in jobs for name in job["metrics"] if name != PREPARED_PERCENT):
        yield (name, *(number(job["metrics"][name]) if name in job["metrics"] else "–" for job in jobs))
    for each in differ:
        yield (each.field, *map(shown, each.values))
