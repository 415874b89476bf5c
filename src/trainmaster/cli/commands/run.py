"""`trainmaster run`: run a job class here, in the foreground, without a server."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import CommandError, ExitCode, UsageError, say
from trainmaster.protocol.reasons import EXIT_STOPPED

if TYPE_CHECKING:
    from trainmaster.jobs.hardware import Cluster

DEFAULT_ROOT = "runs"


def run(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="The class, as module:Class, or the name of a registered one.")
    ],
    overrides: Annotated[
        list[str], typer.Argument(metavar="[KEY=VALUE]...", help="Values over the configuration's; keys have dots.")
    ] = [],  # noqa: B006 - typer copies it
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Its configuration, YAML or JSON.")
    ] = None,
    module: Annotated[
        str | None, typer.Option("--module", help="Imported first, so that a registered name is known.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Who it is; by default the class's name.")] = None,
    project: Annotated[str, typer.Option("--project", help="The project it belongs to.")] = "general",
    group: Annotated[str, typer.Option("--group", help="The group it belongs to.")] = "default",
    root: Annotated[
        str, typer.Option("--root", metavar="DIR", help="Where its files lie; checkpoints may lie below an s3:// URI.")
    ] = DEFAULT_ROOT,
    restore: Annotated[
        str | None,
        typer.Option("--restore", metavar="REL_PATH", help="Begin from another run's checkpoint, as this job."),
    ] = None,
    overlay: Annotated[
        bool, typer.Option("--overlay", help="Go on with another configuration than the checkpoint's.")
    ] = False,
    elastic: Annotated[
        bool,
        typer.Option(
            "--elastic", help="Go on with another number of processes, without their random-number generators."
        ),
    ] = False,
    tracker: Annotated[
        str, typer.Option("--tracker", help="Mirror its metrics to an experiment tracker: none, trackio or wandb.")
    ] = "none",
) -> None:
    """Run a job class here, in the foreground, without a server.

    It goes on from its latest checkpoint, if it has one. SIGTERM or Ctrl-C makes it save and stop, with exit code 85;
    run again, it goes on.
    """
    from trainmaster.jobs import runner
    from trainmaster.jobs.config_document import ConfigurationError, from_yaml
    from trainmaster.jobs.objects import ObjectStoreError
    from trainmaster.jobs.run_plan import RunError, RunRequest
    from trainmaster.jobs.tracker import TRACKERS

    if Path(target).suffix in (".yaml", ".yml", ".json"):
        instead = f"`trainmaster submit {shlex.quote(target)} --follow` runs a job file"
        raise UsageError(f"{target} is not a job class; {instead}")
    if tracker not in TRACKERS:
        raise UsageError(f"--tracker {tracker}: there are {', '.join(TRACKERS)}")
    sys.path.insert(0, os.getcwd())
    try:
        document = from_yaml(config.read_text(), str(config)) if config is not None else {}
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {config}: {getattr(error, 'strerror', None) or error}") from error
    except ConfigurationError as error:
        raise UsageError(str(error)) from error
    request = RunRequest(
        target=target,
        module=module,
        config=document,
        overrides=tuple(overrides),
        name=name or target.rpartition(":")[2].replace("/", "-"),
        project=project,
        group=group,
        restore=restore,
        overlay=overlay,
        elastic=elastic,
        tracker=tracker,
    )
    try:
        runner.run(request, _cluster(root), shows_progress=True)
    except (RunError, ObjectStoreError) as error:
        raise CommandError(str(error)) from error
    except SystemExit as stopped:
        if stopped.code == EXIT_STOPPED:
            say("Saved; the same command goes on from there.")
        raise
    except Exception as error:
        # The class's own: who wrote it wants to see where, and nothing of what called it.
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        raise typer.Exit(ExitCode.REFUSED) from None
    say(f"Complete; its files lie below {root}.")


def _cluster(root: str) -> Cluster:
    from trainmaster.jobs.hardware import Cluster

    if "://" not in root:
        return Cluster(root=os.path.abspath(root))
    return Cluster(root=os.path.abspath(DEFAULT_ROOT), checkpoints=f"{root.rstrip('/')}/checkpoints")
