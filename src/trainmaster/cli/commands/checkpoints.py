"""`trainmaster checkpoints`: what a job can be resumed from; pinned, unpinned, deleted, verified."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from trainmaster.cli.exits import CommandError, ExitCode, UsageError
from trainmaster.cli.human_units import age, number, size
from trainmaster.cli.job_summary import SHOWN_METRICS
from trainmaster.cli.options import JobArgument, JsonOption, complete_job, connect, job_with_files
from trainmaster.cli.output import byte_bar, draw, print_json, styled, table

if TYPE_CHECKING:
    from trainmaster.client import Client
    from trainmaster.client.types import Checkpoint
    from trainmaster.jobs.roots import Root

S3_SCHEME = "s3://"
SHOWN = 3
"""Metrics of a checkpoint in a table; `--json` has all."""


class ListedByDefault(TyperGroup):
    """A group whose command `list` need not be typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `list` in front of what is no command."""
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
    if as_json:
        print_json(checkpoints)
    elif checkpoints:
        _draw(checkpoints)
    else:
        typer.echo("No checkpoints.")


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
            checks = _of_job(client, where, checkpoint)
            results = _run(checks, quiet=as_json)
    elif checkpoint is not None:
        raise UsageError(f"only a job's checkpoints are chosen by name; name the directory itself: {where}")
    else:
        results = _run(_below(where), quiet=as_json)
    if as_json:
        print_json([asdict(result) for result in results])
    else:
        _draw_results(results)
    if not all(result.ok for result in results):
        raise typer.Exit(ExitCode.REFUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A checkpoint to verify: `problems` reads all of it, telling its argument how much was read."""

    checkpoint: str
    step: int | None
    size_bytes: int
    problems: Callable[[Callable[[int], None]], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    checkpoint: str
    step: int | None
    size_bytes: int
    ok: bool
    problems: list[str]


def _of_job(client: Client, job: str, checkpoint: str | None) -> list[Check]:
    job_id = job_with_files(client, job)
    wanted = client.results.checkpoint_id(job_id, checkpoint) if checkpoint is not None else None
    found = client.results.checkpoints(job_id, checkpoint_id=wanted)["checkpoints"]
    if not found:
        name = "checkpoints" if wanted is None else f"checkpoint {wanted}"
        raise CommandError(f"the job has no {name}; `trainmaster checkpoints {job}` lists all")

    def check(one: Checkpoint) -> Check:
        if one["uri"].startswith(S3_SCHEME):
            problems = _problems_at(*_opened(one["uri"]))
        else:
            # The server reads it: where its files lie is the server's affair.
            def problems(progress: Callable[[int], None]) -> list[str]:
                return client.results.verify_checkpoint(job_id, one["checkpoint_id"], progress=progress)

        return Check(checkpoint=one["checkpoint_id"], step=one["step"], size_bytes=one["size_bytes"], problems=problems)

    return [check(one) for one in found]


def _below(where: str) -> list[Check]:
    """The checkpoint at a path or URI, or all below it."""
    from trainmaster.jobs import CorruptCheckpointError
    from trainmaster.jobs.roots import open_checkpoint, open_root

    try:
        root, name = open_checkpoint(where)
        places = [name] if _is_checkpoint(root, name) else []
        if not places:
            root = open_root(where)
            places = root.committed()
    except (ImportError, OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    if not places:
        raise CommandError(f"{where}: no committed checkpoint lies there, or below")

    def check(rel_path: str) -> Check:
        try:
            manifest = root.manifest(rel_path)
        except CorruptCheckpointError:
            manifest = None
        return Check(
            checkpoint=rel_path,
            step=manifest.step if manifest else None,
            size_bytes=manifest.size_bytes if manifest else 0,
            problems=_problems_at(root, rel_path),
        )

    return [check(rel_path) for rel_path in places]


def _opened(uri: str) -> tuple[Root, str]:
    from trainmaster.jobs.roots import open_checkpoint

    try:
        return open_checkpoint(uri)
    except (ImportError, ValueError) as error:
        raise CommandError(str(error)) from error


def _is_checkpoint(root: Root, rel_path: str) -> bool:
    from trainmaster.jobs import CorruptCheckpointError

    try:
        return root.manifest(rel_path) is not None
    except CorruptCheckpointError:
        return True


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


def _run(checks: list[Check], *, quiet: bool) -> list[Result]:
    results = []
    total = sum(check.size_bytes for check in checks)
    with byte_bar(total, quiet=quiet, interrupted="Stopped; nothing was changed.") as progress:
        for check in checks:
            found = check.problems(progress)
            results.append(
                Result(
                    checkpoint=check.checkpoint,
                    step=check.step,
                    size_bytes=check.size_bytes,
                    ok=not found,
                    problems=found,
                )
            )
    return results


def _draw_results(results: list[Result]) -> None:

    rows = [
        (
            result.checkpoint,
            "" if result.step is None else str(result.step),
            size(result.size_bytes),
            styled("ok", "green") if result.ok else styled("corrupt", "bold red"),
            "; ".join(result.problems),
        )
        for result in results
    ]
    headings = ("CHECKPOINT", "STEP", "SIZE", "FILES", "PROBLEM")
    draw(table(headings, rows, right=("STEP", "SIZE"), wrap=("PROBLEM",)))


def _draw(checkpoints: list[Checkpoint]) -> None:

    rows = [
        (
            checkpoint["checkpoint_id"],
            str(checkpoint["step"]),
            "" if checkpoint["epoch"] is None else number(checkpoint["epoch"]),
            _metrics(checkpoint),
            size(checkpoint["size_bytes"]),
            age(checkpoint["created_at"]),
            styled(checkpoint["uri"], "dim"),
            styled(_marks(checkpoint), "green"),
        )
        for checkpoint in checkpoints
    ]
    headings = ("CHECKPOINT", "STEP", "EPOCH", "METRICS", "SIZE", "AGE", "WHERE", "")
    draw(table(headings, rows, right=("STEP", "EPOCH", "SIZE", "AGE"), cut=("METRICS", "WHERE"), spare=("WHERE",)))


def _metrics(checkpoint: Checkpoint) -> str:
    """The losses where it has any, since that is what checkpoints are told apart by; else the first few."""
    metrics = checkpoint["metrics"]
    shown = [name for name in SHOWN_METRICS if name in metrics] or list(metrics)[:SHOWN]
    return "  ".join(f"{name} {number(metrics[name])}" for name in shown)


def _marks(checkpoint: Checkpoint) -> str:
    marks = {"latest": checkpoint["is_latest"], "best": checkpoint["is_best"], "pinned": checkpoint["pinned"]}
    return ", ".join(word for word, is_so in marks.items() if is_so)
