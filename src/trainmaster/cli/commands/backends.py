"""Commands for backends: list where jobs can run; add, test and remove clusters."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli.commands.show import shown
from trainmaster.cli.exits import CommandError, UsageError, say
from trainmaster.cli.options import JsonOption, connect
from trainmaster.cli.output import draw, duration, facts, print_json, print_list, print_result, styled

if TYPE_CHECKING:
    from rich.text import Text

    from trainmaster.client import Client
    from trainmaster.client.types import Backend, BackendSummary, Job

TEST_S = 300.0
LOOK_EVERY_S = 0.5
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "PREEMPTED")
_WHERE = 'if read -r name < /proc/sys/kernel/hostname; then echo "$name"; else uname -n; fi 2> /dev/null'
"""The script of the test job: an image with `sh` and Python need not have `uname`."""

app = typer.Typer(
    help="List where jobs can run; add, test and remove clusters.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The name that jobs use: `backend: NAME`.", show_default=False)
]


@app.callback()
def list_backends(context: typer.Context, as_json: JsonOption = False) -> None:
    if context.invoked_subcommand is None:
        _list(as_json=as_json)


@app.command("list")
def list_command(as_json: JsonOption = False) -> None:
    """List where jobs can run."""
    _list(as_json=as_json)


def _list(*, as_json: bool) -> None:
    with connect() as client:
        found = client.cluster.backends()
    print_list(found, ("BACKEND", "KIND", "DEFAULT", "IMAGES", "OPTIONS"), _row, as_json=as_json, cut=("OPTIONS",))


def _row(backend: BackendSummary) -> tuple[str | Text, ...]:
    return (
        backend["name"],
        backend["kind"],
        "yes" if backend["default"] else "",
        "yes" if backend["images"] else "",
        styled(" ".join(f"{name}={value}" for name, value in _options(backend).items()), "dim"),
    )


def _options(backend: BackendSummary) -> dict[str, str]:
    """The options that say something: not those that are empty, and switches that are off."""
    options = (backend["options"] or {}).items()
    return {name: shown(value) for name, value in options if value not in (None, "", [], {}, False, 0)}


@app.command("show")
def show(name: NameArgument, as_json: JsonOption = False) -> None:
    """Show a backend, and the engine that runs its jobs."""
    with connect() as client:
        backend = client.cluster.backend(name)
    if as_json:
        print_json(backend)
    else:
        draw(*_parts(backend))


def _parts(backend: Backend) -> list[Any]:
    engine = backend["engine"]
    parts: list[Any] = [
        styled(backend["name"], "bold"),
        facts(
            {
                "kind": backend["kind"],
                "default": "yes" if backend["default"] else "no",
                "engine": engine["name"] if engine else None,
                "where": engine["host"] if engine else None,
                "workers reach": backend["server_url"],
                **_options(backend),
            }
        ),
    ]
    if engine and engine["problem"]:
        parts.append(styled(f"  {engine['problem']}", "red"))
    if backend["unreachable"]:
        parts.append(styled(f"  {backend['unreachable']}", "red"))
    return parts


@app.command("add")
def add(
    name: NameArgument,
    kind: Annotated[str, typer.Option("--kind", metavar="KIND", help="slurm, ray or kubernetes.", show_default=False)],
    options: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="An option of this kind; may be repeated.")
    ] = [],  # noqa: B006 - typer copies it
    as_json: JsonOption = False,
) -> None:
    """Add a cluster that jobs can name as their backend, or replace what is known of it."""
    given = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise UsageError(f"--set {option}: write KEY=VALUE")
        given[key] = value
    with connect() as client:
        backend = client.cluster.put_backend(name, kind=kind, options=given)
    print_result(
        backend, f"Jobs can name {name} as their backend. Try it: trainmaster backends test {name}", as_json=as_json
    )


@app.command("remove")
def remove(name: NameArgument, as_json: JsonOption = False) -> None:
    """Remove a cluster on which no job waits or runs."""
    with connect() as client:
        client.cluster.remove_backend(name)
    print_result({"removed": name}, f"{name} is removed.", as_json=as_json)


@app.command("test")
def run_test(
    name: NameArgument,
    timeout: Annotated[float, typer.Option("--timeout", min=1, metavar="S", help="Give up after this time.")] = TEST_S,
    as_json: JsonOption = False,
) -> None:
    """Run a small job on a backend, and say what is wrong if it does not end well."""
    began = time.monotonic()
    with connect() as client:
        backend = client.cluster.backend(name)
        if backend["engine"] and backend["engine"]["problem"]:
            raise CommandError(f"{name}: {backend['engine']['problem']}")
        document = {
            "name": f"test-{name}",
            "backend": name,
            "workload": {"kind": "command", "argv": ["sh", "-c", _WHERE]},
            "resource_config": {"gpu_count": 0},
            "scheduling_config": {"priority": 10, "max_runtime_seconds": 60},
        }
        job_id = client.submit(document)["job_id"]
        try:
            job = _followed(client, job_id, deadline=began + timeout)
        except BaseException:
            client.cancel(job_id, missing_ok=True)
            raise
        if job["status"] != "COMPLETED":
            lines = job["error"]["last_lines"] if job["error"] else []
            detail = "".join(f"\n  {line}" for line in lines)
            message = job["error_message"] or job["status_message"] or ""
            raise CommandError(f"the test job {job_id} ended as {job['status']}: {message}{detail}")
        where = "".join(text.text for text in client.log_texts(job_id)).strip()
        client.delete(job_id, purge=True)
    took_s = time.monotonic() - began
    print_result(
        {"backend": name, "ok": True, "node": where, "seconds": round(took_s, 3)},
        f"{name} works: a job ran on {where} and reported back, all in {duration(took_s)}.",
        as_json=as_json,
    )


def _followed(client: Client, job_id: str, *, deadline: float) -> Job:
    """The job once it has ended, telling meanwhile what it waits for."""
    told = ""
    while True:
        job = client.get(job_id)
        if job["status"] in _ENDED:
            return job
        message = f"{job['status']}: {job['pending_reason'] or job['status_message'] or ''}".rstrip(": ")
        # Not every second of a wait.
        if (kind := re.sub(r"\d+ s more", "", message)) != told:
            told = kind
            say(message)
        if time.monotonic() > deadline:
            client.cancel(job_id, missing_ok=True)
            # The engine may have gone away meanwhile.
            engine = client.cluster.backend(job["backend"])["engine"]
            problem = f"; {engine['problem']}" if engine and engine["problem"] else ""
            raise CommandError(f"the test job {job_id} did not end in time; it was last {message}{problem}")
        time.sleep(LOOK_EVERY_S)
