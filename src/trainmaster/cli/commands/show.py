"""Commands that show jobs in full: show, and diff and compare for several."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from trainmaster.cli import output
from trainmaster.cli.exits import UsageError
from trainmaster.cli.job_summary import PREPARED_PERCENT, brief, failure_lines, steps, title
from trainmaster.cli.options import JobArgument, JobsArgument, JsonOption, connect, job_id_of
from trainmaster.client.training_files import TRAINER

JOB_CLASS = "job_class"
MOST_CHECKPOINTS = 1000
"""Checkpoints that a server shows with a job: the newest."""

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from trainmaster.client import Client
    from trainmaster.client.types import Attempt, Job


def show(jobs: JobsArgument, as_json: JsonOption = False) -> None:
    """Show jobs in full.

    `started` is when its processes first ran, and `ran` how long they did, over all attempts: neither counts what comes
    before them (waiting, fetching and preparing), and pauses are no part of the second.
    """
    with connect() as client:
        found = [client.get(job_id_of(client, job)) for job in jobs]
        if as_json:
            output.print_json(found[0] if len(found) == 1 else found)
            return
        results = [_results(client, job) for job in found]
    for index, job in enumerate(found):
        output.draw(*([""] if index else []), *_parts(job, results[index]))


def _results(client: Client, job: Job) -> str | None:
    """Where the output of a job lies, and how to fetch what `download` has of it."""
    where = job["output"]["model_uri"]
    if where is None:
        return None
    if next(client.results.artifacts(job["job_id"], kind="output", page_size=1), None) is None:
        return None if where.startswith("artifacts:") else where
    return f"{where}; fetch it with `trainmaster download {job['handle'] or job['job_id']}`"


def _parts(job: Job, results: str | None) -> Iterator[RenderableType]:
    title = output.styled(job["name"], "bold").append(f"  {job['job_id']}  ", style="dim not bold")
    yield title.append_text(output.status_text(job["status"]))
    yield output.facts(_facts(job, results))
    if job["error"]:
        first, *rest = failure_lines(job["error"])
        yield output.styled(f"\n{first}", "red")
        yield from map(output.styled, rest)
        yield from (output.styled(f"  │ {line}", "dim") for line in job["error"]["last_lines"])
    if len(job["attempts"]) > 1:
        rows = [_attempt(attempt) for attempt in job["attempts"]]
        yield ""
        yield output.table(("  ATTEMPT", "STARTED", "TOOK", "ENDED", "MESSAGE"), rows, wrap=("MESSAGE",))


def _facts(job: Job, results: str | None) -> dict[str, Any]:
    # The job's own `started_at` is when it was first TRAINING: what its processes do before that counts as run time.
    starts = [attempt["started_at"] for attempt in job["attempts"] if attempt["started_at"]]
    in_attempts = f" in {len(starts)} attempts" if len(starts) > 1 else ""
    retries = f", {job['retries_used']} of {job['max_retries']} retries used" if job["max_retries"] else ""
    endpoint = job["endpoint"]
    return {
        "handle": job["handle"],
        **_training(job),
        "waits": job["pending_reason"],
        "reason": None if job["error"] else _reason(job),
        "progress": brief(job),
        "metrics": "  ".join(
            f"{name} {output.number(value)}" for name, value in job["metrics"].items() if name != PREPARED_PERCENT
        ),
        "queue": f"{job['queue']}, priority {job['priority']}"
        + (f", number {job['queue_position']}" if job["queue_position"] else ""),
        "where": _placement(job),
        "endpoint": endpoint and f"{endpoint['address']}, through the server {endpoint['path']}",
        "labels": "  ".join(f"{key}={value}" for key, value in job["labels"].items()),
        "created": output.clock(job["created_at"]),
        "started": output.clock(starts[0]) if starts else None,
        "finished": output.clock(job["finished_at"]),
        "ran": f"{output.duration(job['runtime_seconds'])}{in_attempts}" if job["runtime_seconds"] else None,
        "GPU time": output.duration(job["gpu_seconds"]) if job["gpu_seconds"] else None,
        "attempt": f"{job['attempt']}{retries}" if job["attempt"] else None,
        "checkpoints": _checkpoints(job),
        "retry of": job["parent_job_id"],
        "runs": _command(job),
        "needs": _needs(job),
        "results": results,
    }


def _reason(job: Job) -> str | None:
    if job["status"] == "COMPLETED":
        return None
    if job["status_reason"] in (None, job["status"]):
        return job["status_message"]
    return f"{job['status_reason']}: {job['status_message']}" if job["status_message"] else job["status_reason"]


def _training(job: Job) -> dict[str, str]:
    """What is trained, how, and on which data: the sources, each with the fields that were given."""
    training, data = job["training_config"], job["data_config"]
    if training is None or (job["workload"] or {"kind": TRAINER})["kind"] != TRAINER:
        return {}
    base, framework = training["base_model"], training["framework"]
    revision = f"@{base['revision']}" if base["revision"] else ""
    does = framework["custom_script_path"] or framework["type"]
    hyperparameters = ", ".join(f"{name} {value}" for name, value in training["hyperparameters"].items())
    told = {
        "trains": f"{base['model_id']}{revision}, {training['training_type']} with {does}",
        "hyperparameters": hyperparameters or "the defaults",
    }
    if data is not None:
        sources = [" ".join([source["path"], *_given_fields(source, "path")]) for source in data["sources"]]
        told["data"] = "\n".join([*sources, ", ".join(_given_fields(data, "sources"))])
    return told


def _given_fields(config: dict[str, Any], *without: str) -> list[str]:
    """The fields of a config that have a value, those of its parts by their dotted names."""
    given: list[str] = []
    for name, value in config.items():
        if name in without or value in (None, "", [], {}, False):
            continue
        if isinstance(value, dict):
            given += [f"{name}.{each}" for each in _given_fields(value)]
        else:
            given.append(f"{name} {shown(value)}")
    return given


def _command(job: Job) -> str | None:
    workload = job["workload"] or {}
    if workload.get("kind") == JOB_CLASS:
        given = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in workload["config"].items())
        return " ".join([workload["target"], *given])
    words = workload.get("argv") or [workload.get("path", ""), *workload.get("args", ())]
    return " ".join(shlex.quote(str(word)) for word in words if word) or None


def _needs(job: Job) -> str | None:
    asked = {name: value for name, value in job["resource_config"].items() if value not in (None, [], 0)}
    if asked.get("node_count") == 1:
        del asked["node_count"]
    return ", ".join(f"{name} {value}" for name, value in asked.items()) or None


def _placement(job: Job) -> str | None:
    placement = job["placement"]
    if not placement:
        return None
    gpus = len(placement["gpus"])
    nodes = placement["nodes"]
    chosen = ", ".join(nodes)
    if set(nodes) == {placement["backend"]}:  # its engine chooses them
        chosen = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    where = f"{placement['backend']}: {chosen}"
    return f"{where}, {gpus} GPU{'s' if gpus > 1 else ''}" if gpus else where


def _checkpoints(job: Job) -> str | None:
    if not job["checkpoints"]:
        return None
    best = f", best {job['best_checkpoint_id']}" if job["best_checkpoint_id"] else ""
    count = len(job["checkpoints"])
    several = f"{count} or more" if count == MOST_CHECKPOINTS else str(count)
    return f"{several}, latest {job['latest_checkpoint_id']}{best}"


def _attempt(attempt: Attempt) -> tuple[str | Text, ...]:
    ran = output.seconds_between(attempt["started_at"], attempt["ended_at"]) if attempt["started_at"] else None
    return (
        f"  {attempt['number']}",
        output.clock(attempt["started_at"]),
        output.duration(ran),
        attempt["reason"] or "runs",
        attempt["message"] or "",
    )


DIGEST_SHOWN = 12
"""Of a file's sha256, enough to tell two apart."""


def differences(jobs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of every field but the name in which the jobs' requests differ; None: a job without the field."""
    from trainmaster.client.types import request_of

    flat = [dict(_flat(request_of(job), "")) for job in jobs]
    names = dict.fromkeys(name for fields in flat for name in fields if name != "name")
    values = {name: [fields.get(name) for fields in flat] for name in names}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every field that has a value, by its dotted path; a shipped file by its digest."""
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
        output.print_json({"jobs": [job["job_id"] for job in jobs], "differences": _document(found)})
    elif found:
        rows = [(field, *map(shown, values)) for field, values in found.items()]
        headings = ("FIELD", *(title(job) for job in jobs))
        output.draw(output.table(headings, rows, wrap=headings[1:]))
    else:
        typer.echo(f"The requests of {title(jobs[0])} and {title(jobs[1])} do not differ.")


def _document(differ: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [{"field": field, "values": values} for field, values in differ.items()]


def shown(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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
        output.print_json({"jobs": compared, "differences": _document(differ)})
        return
    headings = ("", *(job["handle"] or job["job_id"] for job in found))
    output.draw(output.table(headings, _comparison(found, differ), wrap=headings[1:]))


def _comparison(jobs: Sequence[Job], differ: Mapping[str, list[Any]]) -> Iterator[tuple[str, ...]]:
    yield ("name", *(job["name"] for job in jobs))
    yield ("status", *(job["status"] for job in jobs))
    yield ("ran", *(output.duration(job["runtime_seconds"]) for job in jobs))
    if any(steps(job) for job in jobs):
        yield ("step", *(steps(job) for job in jobs))
    for name in dict.fromkeys(name for job in jobs for name in job["metrics"] if name != PREPARED_PERCENT):
        yield (name, *(output.number(job["metrics"][name]) if name in job["metrics"] else "–" for job in jobs))
    for field, values in differ.items():
        yield (field, *map(shown, values))
