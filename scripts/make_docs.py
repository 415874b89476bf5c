"""Writes what of docs/ is made from the code: `states.md`, `job-fields.md`, `hyperparameters.md`, and the settings in
`operations.md`.

`--check` writes nothing and fails when a page is not up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hyperparameters import hyperparameters_page
from job_fields import job_fields_page

from trainmaster.server.core.states import (
    ACTIVE,
    CONSEQUENCES,
    RUNNING,
    TERMINAL,
    TRANSITIONS,
    WAITING,
    Action,
    JobStatus,
    Trigger,
    allowed_from,
)
from trainmaster.server.settings.reference import settings
from trainmaster.server.settings.values import toml_of

DOCS = Path(__file__).parent.parent / "docs"

MEANINGS = {
    JobStatus.PENDING: "accepted; admission checks are to come",
    JobStatus.QUEUED: "admitted; waits for resources",
    JobStatus.SCHEDULING: "resources are reserved; its workers are being started",
    JobStatus.PREPARING: "its workers have it; files and environment are staged",
    JobStatus.TRAINING: "the workload runs (a service: it answers)",
    JobStatus.CHECKPOINTING: "the workload writes a checkpoint",
    JobStatus.EVALUATING: "the workload evaluates",
    JobStatus.EXPORTING: "the workload merges, converts or uploads its result",
    JobStatus.PAUSED: "stopped on request; can be resumed",
    JobStatus.COMPLETED: "ended well",
    JobStatus.FAILED: "ended badly; the error says whose fault it was and what to do",
    JobStatus.CANCELLED: "ended on request",
    JobStatus.PREEMPTED: "its resources were taken, and it was not to be queued again",
}


def states_page() -> str:
    """The lifecycle, read off its table."""
    lines = [
        "# States",
        "",
        "This page is made from `trainmaster.server.core.states` by `make docs`;",
        "`make check` fails when it is out of date.",
        "",
        "## What each state means",
        "",
        "| state | class | holds resources | meaning |",
        "|---|---|---|---|",
    ]
    for status in JobStatus:
        held = "yes" if status in ACTIVE else "no"
        lines.append(f"| {status} | {_class(status)} | {held} | {MEANINGS[status]} |")
    lines += [
        "",
        "## Every legal move",
        "",
        "What is not in this table is refused: a request with 409, a report with an event. Every move writes one event",
        "in the same transaction; one transaction may make several moves.",
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
    lines += ["", "## What may be asked, and when", "", f"| action | {' | '.join(JobStatus)} |"]
    lines.append("|---" * (len(JobStatus) + 1) + "|")
    for action in Action:
        batch, service = allowed_from(action), allowed_from(action, service=True)
        cells = ["yes" if s in batch else "service" if s in service else "409" for s in JobStatus]
        lines.append(f"| {action} | {' | '.join(cells)} |")
    lines += [
        "",
        "`service`: for service jobs only. Retry makes a child job and leaves the record as it is. A second pause is",
        "refused, and so is a pause with `save_checkpoint` of a workload that cannot save.",
        "",
        "## Why attempts end, and what follows",
        "",
        "The reason is recorded first; everything else follows from it. A transient failure is tried again while",
        "`max_retries` allows it; a preemption has a budget of its own (100) and is tried again if `max_retries` is at",
        "least 1. Services are never tried again by themselves: whoever uses them must learn that their state is gone.",
        "",
        "| reason | outcome | whose fault | what to do | with a service, if it differs |",
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


PAGES = {
    "reference/states.md": states_page,
    "reference/job-fields.md": job_fields_page,
    "reference/hyperparameters.md": hyperparameters_page,
    "guides/operations.md": operations_page,
}


def main() -> int:
    """Write the pages, or check them."""
    if "--check" not in sys.argv[1:]:
        for name, page in PAGES.items():
            (DOCS / name).write_text(page())
        return 0
    stale = [name for name, page in PAGES.items() if not (DOCS / name).exists() or (DOCS / name).read_text() != page()]
    for name in stale:
        sys.stderr.write(f"docs/{name} is out of date: run `make docs`\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
