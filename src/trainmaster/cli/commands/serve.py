"""`trainmaster serve`: run a server in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainmaster.cli.exits import CommandError, UsageError
from trainmaster.cli.options import ConfigOption, DataDirOption, DataRootOption


def run(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option("--host", help="The address to listen on [127.0.0.1].")] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="The port [7070]; 0 chooses a free one.")
    ] = None,
    free_port: Annotated[
        bool, typer.Option("--free-port", help="Choose a free port, unless the settings name one.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="The certificate with its chain, in PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="The certificate's private key, in PEM.")] = None,
    behind_proxy: Annotated[
        bool | None, typer.Option("--behind-proxy", help="A proxy in front does TLS.", show_default=False)
    ] = None,
    data_dir: DataDirOption = None,
    database: Annotated[
        str | None, typer.Option("--database", metavar="URL", help="By default SQLite in --data-dir.")
    ] = None,
    roles: Annotated[
        str | None, typer.Option("--roles", help="What this server does [api,coordinator,gateway].")
    ] = None,
    runs_root: Annotated[Path | None, typer.Option("--runs-root", help="Where run directories lie.")] = None,
    artifacts_root: Annotated[Path | None, typer.Option("--artifacts-root", help="Where checkpoints lie.")] = None,
    cache_root: Annotated[Path | None, typer.Option("--cache-root", help="Where fetched models and data lie.")] = None,
    data_root: DataRootOption = None,
    model_alias: Annotated[
        list[str] | None,
        typer.Option(
            "--model-alias", metavar="NAME=DIR", help="A base model that can be asked for by this name; repeatable."
        ),
    ] = None,
    shapes_dir: Annotated[Path | None, typer.Option("--shapes-dir", help="Where training shapes lie.")] = None,
    runtimes_dir: Annotated[Path | None, typer.Option("--runtimes-dir", help="Where training runtimes lie.")] = None,
    transport: Annotated[
        str | None, typer.Option("--transport", help="How local workers report: files or http [files].")
    ] = None,
    stalled_after_s: Annotated[
        float | None,
        typer.Option("--stalled-after-s", min=0.1, help="A job without a step for so long is shown as stalled [900]."),
    ] = None,
    advertise_url: Annotated[
        str | None,
        typer.Option("--advertise-url", metavar="URL", help="Where workers that report by http reach an API."),
    ] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", min=0, help="Jobs on a node at a time; 0: by its cores [0].")
    ] = None,
    simulated_gpus: Annotated[
        str | None,
        typer.Option(
            "--simulated-gpus", metavar="TYPE:N,...", help="Pretend to have these GPUs; semicolons part nodes."
        ),
    ] = None,
) -> None:
    """Run a server in the foreground. SIGTERM stops it; running jobs go on.

    Every setting can also come from a file or a variable; `trainmaster config` shows them all.
    """
    from trainmaster.server.settings.resolution import forget_variables, resolve
    from trainmaster.server.settings.values import SettingsError

    flags = {
        "data_dir": data_dir,
        "host": host,
        "port": port,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "behind_proxy": behind_proxy,
        "database_url": database,
        "runs_root": runs_root,
        "artifacts_root": artifacts_root,
        "cache_root": cache_root,
        "data_roots": data_root,
        "model_aliases": model_alias,
        "shapes_dir": shapes_dir,
        "runtimes_dir": runtimes_dir,
        "roles": roles,
        "transport": transport,
        "advertise_url": advertise_url,
        "simulated_gpus": simulated_gpus,
        "slots_per_node": slots,
        "stalled_after_s": stalled_after_s,
    }
    try:
        resolved = resolve(flags, config=config, defaults={"port": 0} if free_port else {})
    except SettingsError as error:
        problems = [f"  {problem}" for problem in error.problems]
        raise UsageError("\n".join(["the server does not start with these settings:", *problems])) from error
    forget_variables()
    import trainmaster.server.process as server

    try:
        server.serve(resolved.settings, resolved.declared, file=resolved.file, kept=not free_port)
    except (server.TrainmasterError, OSError, ValueError) as error:  # type: ignore[attr-defined]
        raise CommandError(f"the server does not start: {error}") from error
