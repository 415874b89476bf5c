"""`trainmaster diff`: how the requests of two jobs differ."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from trainmaster.cli.bulk import title
from trainmaster.cli.options import JOB_HELP, JsonOption, complete_job, job_id_of
from trainmaster.cli.output import draw, print_json, table
from trainmaster.cli.session import connect

Job = Annotated[str, typer.Argument(metavar="JOB", help=JOB_HELP, autocompletion=complete_job, show_default=False)]


def run(first: Job, second: Job, as_json: JsonOption = False) -> None:
    """Show in which fields the requests of two jobs differ: training, data, resources, files and all the rest.

    Values of secrets are not compared. `trainmaster compare` shows what came out of the jobs.
    """
    from trainmaster.cli.request_diff import differences

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
