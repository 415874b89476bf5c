"""Commands for what jobs leave: checkpoints, download and gc."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from trainmaster.cli.exits import CommandError, ExitCode, UsageError
from trainmaster.cli.job_summary import SHOWN_METRICS
from trainmaster.cli.options import JobArgument, JsonOption, complete_job, connect, job_with_files
from trainmaster.cli.output import (
    age,
    byte_bar,
    draw,
    number,
    print_json,
    print_list,
    print_result,
    size,
    styled,
    table,
)
from trainmaster.client.errors import NotFoundError
from trainmaster.schema.jobs import TERMINAL

if TYPE_CHECKING:
    from rich.text import Text

    from trainmaster.client import Client
    from trainmaster.client.types import Checkpoint
    from trainmaster.jobs.roots import Root

S3_SCHEME = "s3://"
SHOWN = 3
"""Metrics of a checkpoint in a table; `--json` has all."""


class ListedByDefault(TyperGroup):
    """A group whose command `list` need not be typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["list", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ListedByDefault,
    help="List the committed checkpoints of a job; pin, unpin or delete some; verify their files.",
    epilog="'trainmaster checkpoints JOB' is short for 'trainmaster checkpoints list JOB'. All of them take --json.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("list")
def list_checkpoints(
    job: JobArgument,
    pin: Annotated[list[str], typer.Option("--pin", metavar="ID", help="Keep this one; may be repeated.")] = [],  # noqa: B006
    unpin: Annotated[list[str], typer.Option("--unpin", metavar="ID", help="Treat it like the others again.")] = [],  # noqa: B006
    delete: Annotated[list[str], typer.Option("--delete", metavar="ID", help="Remove it, with its files.")] = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """List the committed checkpoints of a job; pin, unpin or delete some of them first."""
    if set(pin) & set(unpin) or set(delete) & {*pin, *unpin}:
        raise UsageError("each checkpoint can be pinned, unpinned or deleted, not two of these at once")
    with connect() as client:
        job_id = job_with_files(client, job)
        for ids, action in (
            (pin, client.results.pin),
            (unpin, client.results.unpin),
            (delete, client.results.delete_checkpoint),
        ):
            for checkpoint_id in ids:
                action(job_id, checkpoint_id)
        checkpoints = client.results.checkpoints(job_id)["checkpoints"]
    print_list(
        checkpoints,
        ("CHECKPOINT", "STEP", "EPOCH", "METRICS", "SIZE", "AGE", "WHERE", ""),
        _checkpoint_row,
        as_json=as_json,
        if_none="No checkpoints.",
        right=("STEP", "EPOCH", "SIZE", "AGE"),
        cut=("METRICS", "WHERE"),
        spare=("WHERE",),
    )


@app.command("verify")
def verify(
    where: Annotated[
        str,
        typer.Argument(
            metavar="WHERE",
            help="A job, or a directory or s3://bucket/prefix with checkpoints in it.",
            autocompletion=complete_job,
            show_default=False,
        ),
    ],
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="CHECKPOINT", help="Of a job, only this one, 'latest' or 'best'.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Read every file of committed checkpoints and compare it with what was committed; exit code 1 if one differs."""
    if not where.startswith(S3_SCHEME) and "/" not in where and not os.path.isdir(where):
        with connect() as client:
            results = _run(_of_job(client, where, checkpoint), quiet=as_json)
    elif checkpoint is not None:
        raise UsageError(f"only a job's checkpoints are chosen by name; name the directory itself: {where}")
    else:
        results = _run(_below(where), quiet=as_json)
    headings = ("CHECKPOINT", "STEP", "SIZE", "FILES", "PROBLEM")
    print_list(results, headings, _result_row, as_json=as_json, right=("STEP", "SIZE"), wrap=("PROBLEM",))
    if not all(result["ok"] for result in results):
        raise typer.Exit(ExitCode.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A checkpoint to verify: `problems` reads all of it, telling its argument how much was read."""

    checkpoint: str
    step: int | None
    size_bytes: int
    problems: Callable[[Callable[[int], None]], list[str]]


def _of_job(client: Client, job: str, checkpoint: str | None) -> list[Check]:
    job_id = job_with_files(client, job)
    wanted = client.results.checkpoint_id(job_id, checkpoint) if checkpoint is not None else None
    found = client.results.checkpoints(job_id, checkpoint_id=wanted)["checkpoints"]
    if not found:
        name = "checkpoints" if wanted is None else f"checkpoint {wanted}"
        raise CommandError(f"the job has no {name}; `trainmaster checkpoints {job}` lists all")

    def check(one: Checkpoint) -> Check:
        if one["uri"].startswith(S3_SCHEME):
            from trainmaster.jobs.roots import open_checkpoint

            try:
                problems = _problems_at(*open_checkpoint(one["uri"]))
            except (ImportError, ValueError) as error:
                raise CommandError(str(error)) from error
        else:
            # The server reads it: where its files lie is the server's affair.
            def problems(progress: Callable[[int], None]) -> list[str]:
                return client.results.verify_checkpoint(job_id, one["checkpoint_id"], progress=progress)

        return Check(checkpoint=one["checkpoint_id"], step=one["step"], size_bytes=one["size_bytes"], problems=problems)

    return [check(one) for one in found]


def _below(where: str) -> list[Check]:
    """The checkpoint at a path or URI, or all below it."""
    from trainmaster.jobs.roots import open_checkpoint, open_root

    try:
        root, name = open_checkpoint(where)
        found = [_check_at(root, name)]
        if found == [None]:
            root = open_root(where)
            found = [_check_at(root, rel_path) for rel_path in root.committed()]
    except (ImportError, OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    if not found:
        raise CommandError(f"{where}: no committed checkpoint lies there, or below")
    return [check for check in found if check is not None]


def _check_at(root: Root, rel_path: str) -> Check | None:
    """None where no checkpoint is committed."""
    from trainmaster.jobs import CorruptCheckpointError

    step, size_bytes = None, 0
    try:
        manifest = root.manifest(rel_path)
        if manifest is None:
            return None
        step, size_bytes = manifest.step, manifest.size_bytes
    except CorruptCheckpointError:
        pass  # the check itself reports it
    return Check(checkpoint=rel_path, step=step, size_bytes=size_bytes, problems=_problems_at(root, rel_path))


def _problems_at(root: Root, rel_path: str) -> Callable[[Callable[[int], None]], list[str]]:
    from trainmaster.jobs import CorruptCheckpointError

    def problems(progress: Callable[[int], None]) -> list[str]:
        try:
            root.verify(rel_path, on_bytes=progress)
        except FileNotFoundError:
            return ["it is not there"]
        except CorruptCheckpointError as error:
            return [str(error).removeprefix(f"{root.locate(rel_path)}/")]
        except OSError as error:
            raise CommandError(str(error)) from error
        return []

    return problems


def _run(checks: list[Check], *, quiet: bool) -> list[dict[str, Any]]:
    results = []
    total = sum(check.size_bytes for check in checks)
    with byte_bar(total, quiet=quiet, interrupted="Stopped; nothing was changed.") as progress:
        for check in checks:
            problems = check.problems(progress)
            results.append(
                {
                    "checkpoint": check.checkpoint,
                    "step": check.step,
                    "size_bytes": check.size_bytes,
                    "ok": not problems,
                    "problems": problems,
                }
            )
    return results


def _result_row(result: dict[str, Any]) -> tuple[str | Text, ...]:
    return (
        result["checkpoint"],
        "" if result["step"] is None else str(result["step"]),
        size(result["size_bytes"]),
        styled("ok", "green") if result["ok"] else styled("corrupt", "bold red"),
        "; ".join(result["problems"]),
    )


def _checkpoint_row(checkpoint: Checkpoint) -> tuple[str | Text, ...]:
    marks = {"latest": checkpoint["is_latest"], "best": checkpoint["is_best"], "pinned": checkpoint["pinned"]}
    return (
        checkpoint["checkpoint_id"],
        str(checkpoint["step"]),
        "" if checkpoint["epoch"] is None else number(checkpoint["epoch"]),
        _metrics(checkpoint),
        size(checkpoint["size_bytes"]),
        age(checkpoint["created_at"]),
        styled(checkpoint["uri"], "dim"),
        styled(", ".join(word for word, is_so in marks.items() if is_so), "green"),
    )


def _metrics(checkpoint: Checkpoint) -> str:
    """The losses where it has any, since that is what checkpoints are told apart by; else the first few."""
    metrics = checkpoint["metrics"]
    shown = [name for name in SHOWN_METRICS if name in metrics] or list(metrics)[:SHOWN]
    return "  ".join(f"{name} {number(metrics[name])}" for name in shown)


NAMED = 5
"""Files that are named when none of them was meant."""
PATTERN_HELP = "Only these files: a path, '*.safetensors', or a directory."


def download(
    job: JobArgument,
    patterns: Annotated[list[str], typer.Argument(metavar="[PATTERN]...", help=PATTERN_HELP, show_default=False)] = [],  # noqa: B006
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="ID", help="Of this checkpoint, 'latest' or 'best'; else the output."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Where to; by default ./JOB, or ./CHECKPOINT.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch the output of a job, or a checkpoint. An interrupted download continues; what is here already stays."""
    with connect() as client:
        job_id = job_with_files(client, job)
        if checkpoint is not None:
            checkpoint = client.results.checkpoint_id(job_id, checkpoint)
        directory = output or Path(checkpoint or job_id)
        wanted = client.results.targets(job_id, directory, patterns=patterns, checkpoint=checkpoint)
        if not wanted:
            every = client.results.targets(job_id, directory, checkpoint=checkpoint) if patterns else []
            there = [str(target.path.relative_to(directory)) for target in every]
            raise CommandError(_no_files_message(client, job_id, checkpoint, patterns, there))
        total = sum(target.artifact["size_bytes"] for target in wanted)
        with byte_bar(total, quiet=as_json, interrupted="Stopped; the same command continues from here.") as progress:
            client.results.fetch(job_id, wanted, directory, progress=progress)
    files = "1 file" if len(wanted) == 1 else f"{len(wanted)} files"
    document = [{**target.artifact, "file": str(target.path)} for target in wanted]
    print_result(document, f"{files}, {size(total)}, in {directory}", as_json=as_json)


def _no_files_message(
    client: Client, job_id: str, checkpoint: str | None, patterns: Sequence[str], there: Sequence[str]
) -> str:
    if there:
        more = f" and {len(there) - NAMED} more" if len(there) > NAMED else ""
        return f"no file matches {' '.join(patterns)}; there are {', '.join(there[:NAMED])}{more}"
    if checkpoint is not None:
        return f"the job has no files of a checkpoint {checkpoint}; `trainmaster checkpoints {job_id}` lists all"
    what, advice = "output and no checkpoints", ""
    if client.results.has_checkpoints(job_id):
        what, advice = "output", f"; `trainmaster download {job_id} --checkpoint latest` fetches a checkpoint"
    try:
        status = client.get(job_id)["status"]
    except NotFoundError:  # deleted
        return f"the job has left no {what}{advice}"
    if status in TERMINAL:
        return f"the job is {status} and has left no {what}{advice}"
    return f"the job is {status} and has no {what} yet; `trainmaster logs -f {job_id}` follows it to its end{advice}"


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only tell what would go.")] = False,
    orphans: Annotated[
        bool, typer.Option("--orphans", help="Also directories of jobs that the server does not know, after a day.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove what the server's settings do not keep any longer. It does so by itself, now and then."""
    with connect() as client:
        collection = client.results.collect(dry_run=dry_run, orphans=orphans)
    if as_json:
        print_json(collection)
        return
    stay = [] if orphans else [kind for kind in collection["kinds"] if kind["what"] == "orphan"]
    failed = [kind for kind in collection["kinds"] if kind["what"] == "failed"]
    gone = [kind for kind in collection["kinds"] if kind not in (*stay, *failed)]
    if gone:
        rows = [(kind["what"], str(kind["count"]), size(kind["size_bytes"]), ", ".join(kind["names"])) for kind in gone]
        headings = ("WOULD GO" if dry_run else "GONE", "HOW MANY", "BYTES", "WHICH")
        draw(table(headings, rows, right=("HOW MANY", "BYTES"), cut=("WHICH",)))
    else:
        typer.echo("Nothing to remove: all that is here is kept.")
    for kind in stay:
        directories = "directory belongs" if kind["count"] == 1 else "directories belong"
        typer.echo(f"{kind['count']} {directories} to no job that the server knows ({size(kind['size_bytes'])}):")
        for name in kind["names"]:
            typer.echo(f"  {name}")
        typer.echo("What belongs to nobody stays, unless you say `trainmaster gc --orphans`.")
    for name in (name for kind in failed for name in kind["names"]):
        typer.echo(f"Not collected: {name}", err=True)
