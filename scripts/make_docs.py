"""Writes what of docs/ is made from the code: `states.md`, `job-fields.md`, `hyperparameters.md`, `backends.md`,
`models.md`, and the settings in `operations.md`; and what of deploy/ is made from the code and the Helm chart.

`--check` writes nothing and fails when a file is not up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from backends import backends_page
from chart import manifests, values_schema
from hyperparameters import hyperparameters_page
from job_fields import job_fields_page

from models import models_page
from trainmaster.server.core.states import (
    ACTIVE,
    CONSEQUENCES,
    MEANINGS,
    RUNNING,
    TERMINAL,
    TRANSITIONS,
    WAITING,
    Action,
    JobStatus,
    Trigger,
    allowed_from,
)
from trainmaster.server.settings.resolution import settings
from trainmaster.server.settings.values import toml_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def states_page() -> str:
    """The lifecycle, read off its table."""
    lines = [
        "# States",
        "",
        "This page lists the states of a job, the transitions between them, and the reasons why attempts end.",
        "`make docs` generates it from `trainmaster.server.core.states`.",
        "",
        "## Meaning of the states",
        "",
        "| state | class | holds resources | meaning |",
        "|---|---|---|---|",
    ]
    for status in JobStatus:
        held = "yes" if status in ACTIVE else "no"
        lines.append(f"| {status} | {_class(status)} | {held} | {MEANINGS[status]} |")
    lines += [
        "",
        "## Transitions",
        "",
        "Transitions that are not in this table are refused: a request gets 409, and a worker's report becomes an",
        "event. Every transition writes one event, in the same database transaction. One database transaction may",
        "contain several transitions.",
        "",
        "| from | to | trigger | set by | meaning |",
        "|---|---|---|---|---|",
    ]
    statuses, triggers = [None, *JobStatus], list(Trigger)
    # The table is a mapping without an order of its own; the page must not change from run to run.
    for source, trigger in sorted(TRANSITIONS, key=lambda key: (triggers.index(key[1]), statuses.index(key[0]))):
        edge = TRANSITIONS[source, trigger]
        note = " (services only)" if edge.service_only else ""
        lines.append(f"| {source or '–'} | {edge.to} | {trigger} | {edge.actor} | {edge.meaning}{note} |")
    lines += ["", "## Allowed actions", "", f"| action | {' | '.join(JobStatus)} |"]
    lines.append("|---" * (len(JobStatus) + 1) + "|")
    for action in Action:
        batch, service = allowed_from(action), allowed_from(action, service=True)
        cells = ["yes" if s in batch else "service" if s in service else "409" for s in JobStatus]
        lines.append(f"| {action} | {' | '.join(cells)} |")
    lines += [
        "",
        "`service`: for service jobs only. A retry creates a child job and does not change the original. A second",
        "pause is refused, and so is a pause with `save_checkpoint` if the workload cannot save.",
        "",
        "## Why attempts end, and what follows",
        "",
        "Every attempt ends with a reason, which determines the outcome. A transient failure is retried while",
        "`max_retries` allows it. Preemptions have a separate limit (100) and are retried only with `max_retries` of 1",
        "or more. Services are never retried automatically: their clients must know that the state in memory is lost.",
        "",
        "| reason | outcome | caused by | what to do | for a service, if different |",
        "|---|---|---|---|---|",
    ]
    for reason, row in CONSEQUENCES.items():
        lines.append(f"| {reason} | {row.outcome} | {row.fault} | {row.advice} | {row.service_advice} |")
    return "\n".join(lines) + "\n"


def _class(status: JobStatus) -> str:
    if status in TERMINAL:
        return "terminal"
    if status in RUNNING:
        return "running"
    if status in WAITING:
        return "waiting"
    return "parked" if status is JobStatus.PAUSED else "starting"


def operations_page() -> str:
    """The page for operators as it is, with the settings read off their class."""
    page = (DOCS / "guides" / "operations.md").read_text()
    begin = page.index(": begin -->\n") + len(": begin -->\n")
    lines = ["| setting | flag | default | meaning |", "|---|---|---|---|"]
    for each in settings():
        default = "" if each.default in (None, "", ()) else f"`{toml_of(each.default)}`"
        cells = (f"`{each.name}`", f"`{each.flag}`" if each.flag else "", default, each.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return page[:begin] + "\n".join(lines) + "\n" + page[page.index("<!-- end -->") :]


FILES = {
    "docs/reference/states.md": states_page,
    "docs/reference/job-fields.md": job_fields_page,
    "docs/reference/hyperparameters.md": hyperparameters_page,
    "docs/reference/backends.md": backends_page,
    "docs/reference/models.md": models_page,
    "docs/guides/operations.md": operations_page,
    "deploy/helm/trainmaster/values.schema.json": values_schema,
    "deploy/kubernetes/trainmaster.yaml": manifests,
}


def main() -> int:
    """Write the files, or check them."""
    if "--check" not in sys.argv[1:]:
        for name, text in FILES.items():
            (ROOT / name).write_text(text())
        return 0
    stale = [name for name, text in FILES.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text()]
    for name in stale:
        sys.stderr.write(f"{name} is out of date: run `make docs`\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
