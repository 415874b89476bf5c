"""`trainmaster show`: all that there is to say about a job."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainmaster.cli.commands.comparison import shown
from trainmaster.cli.human_units import clock, duration, number, seconds_between
from trainmaster.cli.job_summary import PREPARED_PERCENT, brief, failure_lines
from trainmaster.cli.options import JobsArgument, JsonOption, connect, job_id_of
from trainmaster.cli.output import draw, facts, print_json, status_text, table
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
            print_json(found[0] if len(found) == 1 else found)
            return
        results = [_results(client, job) for job in found]
    for index, job in enumerate(found):
        draw(*([""] if index else []), *_parts(job, results[index]))


def _results(client: Client, job: Job) -> str | None:
    """Where the output of a job lies, and how to fetch what `download` has of it."""
    where = job["output"]["model_uri"]
    if where is None:
        return None
    if next(client.results.artifacts(job["job_id"], kind="output", page_size=1), None) is None:
        return None if where.startswith("artifacts:") else where
    return f"{where}; fetch it with `trainmaster download {job['handle'] or job['job_id']}`"


def _parts(job: Job, results: str | None) -> Iterator[RenderableType]:
    from rich.text import Text

    title = Text(job["name"], style="bold").append(f"  {job['job_id']}  ", style="dim not bold")
    yield title.append_text(status_text(job["status"]))
    yield facts(_facts(job, results))
    if job["error"]:
        first, *rest = failure_lines(job["error"])
        yield Text(f"\n{first}", style="red")
        yield from (Text(line) for line in rest)
        yield from (Text(f"  │ {line}", style="dim") for line in job["error"]["last_lines"])
    if len(job["attempts"]) > 1:
        rows = [_attempt(attempt) for attempt in job["attempts"]]
        yield ""
        yield table(("  ATTEMPT", "STARTED", "TOOK", "ENDED", "MESSAGE"), rows, wrap=("MESSAGE",))


def _facts(job: Job, results: str | None) -> dict[str, Any]:
    return {
        "handle": job["handle"],
        "trains": _training(job),
        "hyperparameters": _hyperparameters(job),
        "data": _data(job),
        "waits": job["pending_reason"],
        "reason": None if job["error"] else _reason(job),
        "progress": brief(job),
        "metrics": "  ".join(
            f"{name} {number(value)}" for name, value in job["metrics"].items() if name != PREPARED_PERCENT
        ),
        "queue": f"{job['queue']}, priority {job['priority']}"
        + (f", number {job['queue_position']}" if job["queue_position"] else ""),
        "where": _placement(job),
        "endpoint": _endpoint(job),
        "labels": "  ".join(f"{key}={value}" for key, value in job["labels"].items()),
        "created": clock(job["created_at"]),
        "started": clock(_first_start(job)),
        "finished": clock(job["finished_at"]),
        "ran": _ran(job),
        "GPU time": duration(job["gpu_seconds"]) if job["gpu_seconds"] else None,
        "attempt": _attempts(job),
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


def _attempts(job: Job) -> str | None:
    if not job["attempt"]:
        return None
    retries = f", {job['retries_used']} of {job['max_retries']} retries used" if job["max_retries"] else ""
    return f"{job['attempt']}{retries}"


def _first_start(job: Job) -> str | None:
    # The job's own `started_at` is when it was first TRAINING: what its processes do before that counts as run time.
    return next((attempt["started_at"] for attempt in job["attempts"] if attempt["started_at"]), None)


def _ran(job: Job) -> str | None:
    if not job["runtime_seconds"]:
        return None
    count = sum(1 for attempt in job["attempts"] if attempt["started_at"])
    return duration(job["runtime_seconds"]) + (f" in {count} attempts" if count > 1 else "")


def _training(job: Job) -> str | None:
    training = _trained(job)
    if training is None:
        return None
    base, framework = training["base_model"], training["framework"]
    revision = f"@{base['revision']}" if base["revision"] else ""
    does = framework["custom_script_path"] or framework["type"]
    return f"{base['model_id']}{revision}, {training['training_type']} with {does}"


def _hyperparameters(job: Job) -> str | None:
    training = _trained(job)
    if training is None:
        return None
    given = ", ".join(f"{name} {value}" for name, value in training["hyperparameters"].items())
    return given or "the defaults"


def _data(job: Job) -> str | None:
    """The sources, each with what was said about it, and how they are read."""
    data = job["data_config"]
    if data is None or _trained(job) is None:
        return None
    sources = [" ".join([source["path"], *_said(source, "path")]) for source in data["sources"]]
    return "\n".join([*sources, ", ".join(_said(data, "sources"))])


def _trained(job: Job) -> dict[str, Any] | None:
    """What is trained, if that is what the job does."""
    kind = (job["workload"] or {"kind": TRAINER})["kind"]
    return job["training_config"] if kind == TRAINER else None


def _said(config: dict[str, Any], *without: str) -> list[str]:
    """The fields of a config that say something, those of its parts by their dotted names."""
    said: list[str] = []
    for name, value in config.items():
        if name in without or value in (None, "", [], {}, False):
            continue
        inner = [f"{name}.{each}" for each in _said(value)] if isinstance(value, dict) else [f"{name} {shown(value)}"]
        said += inner
    return said


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
    where = f"{placement['backend']}: {', '.join(placement['nodes'])}"
    return f"{where}, {gpus} GPU{'s' if gpus > 1 else ''}" if gpus else where


def _endpoint(job: Job) -> str | None:
    endpoint = job["endpoint"]
    return f"{endpoint['address']}, through the server {endpoint['path']}" if endpoint else None


def _checkpoints(job: Job) -> str | None:
    if not job["checkpoints"]:
        return None
    best = f", best {job['best_checkpoint_id']}" if job["best_checkpoint_id"] else ""
    count = len(job["checkpoints"])
    several = f"{count} or more" if count == MOST_CHECKPOINTS else str(count)
    return f"{several}, latest {job['latest_checkpoint_id']}{best}"


def _attempt(attempt: Attempt) -> tuple[Text, ...]:
    from rich.text import Text

    ran = seconds_between(attempt["started_at"], attempt["ended_at"]) if attempt["started_at"] else None
    return (
        Text(f"  {attempt['number']}"),
        Text(clock(attempt["started_at"])),
        Text(duration(ran)),
        Text(attempt["reason"] or "runs"),
        Text(attempt["message"] or ""),
    )
