"""`trainmaster serve`: run a server in the foreground."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from trainmaster.cli.exits import CommandError

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)


def run(
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 chooses a free one.")] = 7070,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", help="All of its state; by default TRAINMASTER_HOME, else ~/.trainmaster."),
    ] = None,
    database: Annotated[str, typer.Option("--database", metavar="URL", help="By default SQLite in --data-dir.")] = "",
    roles: Annotated[str, typer.Option("--roles", help="What this server does.")] = "api,coordinator,gateway",
    runs_root: Annotated[Path | None, typer.Option("--runs-root", help="Where run directories lie.")] = None,
    artifacts_root: Annotated[Path | None, typer.Option("--artifacts-root", help="Where checkpoints lie.")] = None,
    data_root: Annotated[
        list[Path],
        typer.Option(
            "--data-root",
            metavar="PATH",
            help="Where paths that jobs name may lie; by default your home. May be repeated.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    transport: Annotated[str, typer.Option("--transport", help="How local workers report: files or http.")] = "files",
    stalled_after_s: Annotated[
        float, typer.Option("--stalled-after-s", min=0.1, help="A job without a step for so long is shown as stalled.")
    ] = 900.0,
    advertise_url: Annotated[
        str, typer.Option("--advertise-url", metavar="URL", help="Where workers that report by http reach an API.")
    ] = "",
    slots: Annotated[int, typer.Option("--slots", min=0, help="Jobs on a node at a time; 0: by its cores.")] = 0,
    simulated_gpus: Annotated[
        str,
        typer.Option(
            "--simulated-gpus",
            envvar="TRAINMASTER_SIMULATED_GPUS",
            metavar="TYPE:N,...",
            help="Pretend to have these GPUs; semicolons part nodes.",
        ),
    ] = "",
) -> None:
    """Run a server in the foreground. SIGTERM stops it; running jobs go on."""
    import trainmaster.server as server
    from trainmaster.settings import Role, Settings, TransportKind, default_data_dir

    settings = Settings(
        data_dir=(data_dir or default_data_dir()).absolute(),
        host=host,
        port=port,
        database_url=database,
        runs_root=runs_root.absolute() if runs_root else None,
        artifacts_root=artifacts_root.absolute() if artifacts_root else None,
        data_roots=tuple(root.absolute() for root in data_root),
        roles=frozenset(_choice(Role, role.strip(), "--roles") for role in roles.split(",")),
        transport=_choice(TransportKind, transport, "--transport"),
        advertise_url=advertise_url,
        simulated_gpus=simulated_gpus,
        slots_per_node=slots,
        stalled_after_s=stalled_after_s,
    )
    try:
        server.serve(settings)
    except (server.TrainmasterError, OSError, ValueError) as error:  # type: ignore[attr-defined]
        raise CommandError(f"the server does not start: {error}") from error


def _choice(choices: type[ChoiceT], word: str, option: str) -> ChoiceT:
    try:
        return choices(word)
    except ValueError:
        known = ", ".join(choices)
        raise typer.BadParameter(f"'{word}' is none of: {known}", param_hint=f"'{option}'") from None
