"""Commands that start, stop and configure a server: up, down, serve and config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import CommandError, ExitCode, UsageError, say
from trainmaster.cli.options import ConfigOption, DataDirOption, DataRootOption, JsonOption
from trainmaster.cli.output import draw, print_json, styled, table

if TYPE_CHECKING:
    from trainmaster.server.settings.resolution import Resolved


def up(
    config: ConfigOption = None,
    data_root: DataRootOption = None,
    model_alias: Annotated[
        list[str],
        typer.Option(
            "--model-alias",
            metavar="NAME=DIRECTORY",
            help="What clients of a trainer service call the model in a directory. May be repeated.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    as_json: JsonOption = False,
) -> None:
    """Start the local server, unless it runs.

    The options are for this start. What shall hold whenever it is started belongs into its settings file.
    """
    from trainmaster.cli.job_file import pairs
    from trainmaster.client import local

    aliases = {name: Path(directory).absolute() for name, directory in pairs(model_alias, "--model-alias").items()}
    named = ",".join(f"{name}={directory}" for name, directory in aliases.items())
    before = local.find()
    server = before or local.start(
        config, data_roots=data_root or (), settings={"model_aliases": named} if named else {}, asked=True
    )
    if before and (config or data_root or model_alias):
        say("It runs with the settings of its start; for others, run `trainmaster down` first.")
    if as_json:
        print_json(
            {
                "url": server.url,
                "data_dir": str(server.data_dir),
                "pid": server.process.pid,
                "version": server.version,
                "started": before is None,
            }
        )
        return
    typer.echo(f"The local server {'runs already' if before else 'is up'} at {server.url}")
    typer.echo(f"  state    {server.data_dir}")
    typer.echo(f"  log      {local.log_file()}")
    typer.echo("Submit a job with `trainmaster submit FILE`; stop the server with `trainmaster down`.")


def down(as_json: JsonOption = False) -> None:
    """Stop the local server; running jobs go on."""
    from trainmaster.client import local

    stopped = local.stop()
    if as_json:
        print_json({"stopped": stopped, "data_dir": str(local.data_dir())})
    elif stopped:
        typer.echo("The local server is down. Running jobs go on; `trainmaster up` finds them again.")
    else:
        typer.echo("No local server runs.")


def serve(
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
        bool | None, typer.Option("--behind-proxy", help="A proxy in front terminates TLS.", show_default=False)
    ] = None,
    data_dir: DataDirOption = None,
    database: Annotated[
        str | None, typer.Option("--database", metavar="URL", help="By default SQLite in --data-dir.")
    ] = None,
    roles: Annotated[
        str | None, typer.Option("--roles", help="What this server does [api,coordinator,gateway].")
    ] = None,
    runs_root: Annotated[Path | None, typer.Option("--runs-root", help="The directory of run directories.")] = None,
    artifacts_root: Annotated[
        Path | None, typer.Option("--artifacts-root", help="The directory of checkpoints.")
    ] = None,
    cache_root: Annotated[
        Path | None, typer.Option("--cache-root", help="The cache of fetched models and data.")
    ] = None,
    data_root: DataRootOption = None,
    model_alias: Annotated[
        list[str] | None,
        typer.Option(
            "--model-alias", metavar="NAME=DIR", help="A base model of trainer services, by this name; repeatable."
        ),
    ] = None,
    shapes_dir: Annotated[Path | None, typer.Option("--shapes-dir", help="The directory of training shapes.")] = None,
    runtimes_dir: Annotated[
        Path | None, typer.Option("--runtimes-dir", help="The directory of training runtimes.")
    ] = None,
    transport: Annotated[
        str | None, typer.Option("--transport", help="How local workers report: files or http [files].")
    ] = None,
    stalled_after_s: Annotated[
        float | None,
        typer.Option(
            "--stalled-after-s", min=0.1, help="A job without a step for this long is shown as stalled [900]."
        ),
    ] = None,
    advertise_url: Annotated[
        str | None,
        typer.Option("--advertise-url", metavar="URL", help="The API address for workers that report over HTTP."),
    ] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", min=0, help="Jobs on a node at a time; 0: by its cores [0].")
    ] = None,
    simulated_gpus: Annotated[
        str | None,
        typer.Option("--simulated-gpus", metavar="TYPE:N,...", help="Simulate these GPUs; semicolons separate nodes."),
    ] = None,
) -> None:
    """Run a server in the foreground. SIGTERM stops it; running jobs go on.

    Every setting can also come from a file or a variable; `trainmaster config` shows them all.
    """
    from trainmaster.server.settings.resolution import SettingsError, forget_variables, resolve

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


def config(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only say what is wrong; exits with 1 when something is.")
    ] = False,
    example: Annotated[bool, typer.Option("--example", help="Print a settings file with every default.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show every setting of a server, and where it comes from. Needs no server."""
    from trainmaster.server.settings import resolution
    from trainmaster.server.settings.resolution import SettingsError, resolve

    if example:
        typer.echo(resolution.example(), nl=False)
        return
    try:
        resolved = resolve({"data_dir": data_dir}, config=config)
    except SettingsError as error:
        if as_json:
            print_json({"problems": [{"place": each.place, "message": each.message} for each in error.problems]})
        else:
            say("\n".join(f"error: {problem}" for problem in error.problems))
        raise typer.Exit(ExitCode.REFUSED) from None
    if check and (wrong := _problems(resolved)):
        if as_json:
            print_json({"problems": [{"place": "", "message": message} for message in wrong]})
        else:
            say("\n".join(f"error: {message}" for message in wrong))
        raise typer.Exit(ExitCode.REFUSED)
    if as_json:
        print_json(_document(resolved))
    elif check:
        typer.echo(f"The settings are fine ({resolved.file or 'there is no file'}).")
    else:
        _draw(resolved)


def _problems(resolved: Resolved) -> list[str]:
    from trainmaster.server.process import problems

    return problems(resolved.settings, resolved.declared)


def _document(resolved: Resolved) -> dict[str, object]:
    from trainmaster.server.settings import resolution

    return {
        "file": str(resolved.file) if resolved.file else None,
        "problems": [],
        "settings": {
            each.name: {"value": _plain(value), "source": origin.source, "place": origin.place, "meaning": each.meaning}
            for each, value, origin in resolution.shown(resolved)
        },
        **{
            name: {entry: {key: _plain(value) for key, value in said.items()} for entry, said in entries.items()}
            for name, entries in resolution.shown_tables(resolved).items()
        },
    }


def _draw(resolved: Resolved) -> None:

    from trainmaster.server.settings import resolution
    from trainmaster.server.settings.resolution import SettingSource

    typer.echo(f"File: {resolved.file or 'none'}\n")
    rows = [
        (
            each.name,
            styled(_words(value), "" if origin.source is SettingSource.DEFAULT else "bold"),
            styled(origin.place or origin.source, "dim"),
            styled(each.meaning, "dim"),
        )
        for each, value, origin in resolution.shown(resolved)
    ]
    draw(table(("SETTING", "VALUE", "FROM", "MEANING"), rows, wrap=("VALUE", "FROM", "MEANING"), spare=("MEANING",)))
    for name, entries in resolution.shown_tables(resolved).items():
        for entry, said in entries.items():
            typer.echo(f"\n[{name}.{entry}]")
            for key, value in said.items():
                typer.echo(f"  {key} = {_words(value)}")


def _plain(value: object) -> object:
    match value:
        case None | bool() | int() | float():
            return value
        case tuple():
            return [_plain(each) for each in value]
        case frozenset():
            return sorted(str(each) for each in value)
        case _:
            return str(value)


def _words(value: object) -> str:
    plain = _plain(value)
    match plain:
        case None | "" | []:
            return "–"
        case bool():
            return "true" if plain else "false"
        case list():
            return ", ".join(map(str, plain))
        case _:
            return str(plain)
