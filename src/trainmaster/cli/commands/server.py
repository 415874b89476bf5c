"""Commands that start, stop, configure and choose a server: up, down, serve, config, login, logout and env."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from trainmaster.cli.exits import CommandError, ExitCode, UsageError, say
from trainmaster.cli.options import ConfigOption, DataDirOption, DataRootOption, JsonOption, connect
from trainmaster.cli.output import draw, print_json, print_result, styled, table
from trainmaster.client import local
from trainmaster.client.server_lookup import (
    KEY_VARIABLE,
    URL_VARIABLE,
    Address,
    configured_url,
    login_file,
    remove_login,
    save_login,
)

if TYPE_CHECKING:
    from trainmaster.client.types import Key
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

    aliases = {name: Path(directory).absolute() for name, directory in pairs(model_alias, "--model-alias").items()}
    named = ",".join(f"{name}={directory}" for name, directory in aliases.items())
    before = local.find()
    server = before or local.start(
        config, data_roots=data_root or (), settings={"model_aliases": named} if named else {}, asked=True
    )
    if before and (config or data_root or model_alias):
        say("It runs with the settings of its start; for others, run `trainmaster down` first.")
    print_result(
        {
            "url": server.url,
            "data_dir": str(server.data_dir),
            "pid": server.process.pid,
            "version": server.version,
            "started": before is None,
        },
        f"The local server {'runs already' if before else 'is up'} at {server.url}",
        f"  state    {server.data_dir}",
        f"  log      {local.log_file()}",
        "Submit a job with `trainmaster submit FILE`; stop the server with `trainmaster down`.",
        as_json=as_json,
    )


def down(as_json: JsonOption = False) -> None:
    """Stop the local server; jobs keep running."""
    stopped = local.stop()
    told = "The local server is down. Jobs keep running; `trainmaster up` finds them again."
    document = {"stopped": stopped, "data_dir": str(local.data_dir())}
    print_result(document, told if stopped else "No local server runs.", as_json=as_json)


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
    database_url: Annotated[
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
    data_roots: DataRootOption = None,
    model_aliases: Annotated[
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
    slots_per_node: Annotated[
        int | None, typer.Option("--slots", min=0, help="Jobs on a node at a time; 0: by its cores [0].")
    ] = None,
    simulated_gpus: Annotated[
        str | None,
        typer.Option("--simulated-gpus", metavar="TYPE:N,...", help="Simulate these GPUs; semicolons separate nodes."),
    ] = None,
) -> None:
    """Run a server in the foreground. SIGTERM stops it; jobs keep running.

    Every setting can also come from a file or a variable; `trainmaster config` shows them all.
    """
    # Every other parameter has the name of its setting.
    flags = {name: value for name, value in locals().items() if name not in ("config", "free_port")}
    from trainmaster.server.settings.resolution import SettingsError, forget_variables, resolve

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

    if example:
        typer.echo(resolution.example(), nl=False)
        return
    try:
        resolved = resolution.resolve({"data_dir": data_dir}, config=config)
    except resolution.SettingsError as error:
        _refuse([(each.place, each.message) for each in error.problems], as_json)
    if check:
        from trainmaster.server.process import problems

        if wrong := problems(resolved.settings, resolved.declared):
            _refuse([("", message) for message in wrong], as_json)
    if as_json:
        print_json(_document(resolved))
    elif check:
        typer.echo(f"The settings are fine ({resolved.file or 'there is no file'}).")
    else:
        _draw(resolved)


def _refuse(problems: Sequence[tuple[str, str]], as_json: bool) -> NoReturn:
    """Report problems, each with its place in the file if it has one."""
    if as_json:
        print_json({"problems": [{"place": place, "message": message} for place, message in problems]})
    else:
        say("\n".join(f"error: {f'{place}: ' if place else ''}{message}" for place, message in problems))
    raise typer.Exit(ExitCode.REFUSED)


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

    typer.echo(f"File: {resolved.file or 'none'}\n")
    rows = [
        (
            each.name,
            styled(_words(value), "" if origin.source is resolution.SettingSource.DEFAULT else "bold"),
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


def login(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="The server, such as https://train.example.com.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", metavar="FILE", help="Trust the certificates in this file, not the system's.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Use a server for all later commands; without a URL, show which server and which key are in use.

    The API key is read from TRAINMASTER_API_KEY, from a prompt on a terminal, or else from the standard input. URL and
    key are saved in login.json in TRAINMASTER_HOME (~/.trainmaster), readable by you alone. TRAINMASTER_URL and
    TRAINMASTER_API_KEY win over them; `trainmaster logout` removes them.
    """
    from trainmaster.client import Client

    if url is None:
        if ca is not None:
            raise UsageError("--ca goes with a URL")
        _show_current(as_json=as_json)
        return
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"'{url}' is not a URL; write the server's, such as https://train.example.com")
    wanted = Address(
        url=url.rstrip("/"),
        api_key=os.environ.get(KEY_VARIABLE) or _read_key(),
        ca=str(ca.absolute()) if ca else None,
    )
    with Client(wanted.url, wanted.api_key, ca=wanted.ca) as client:
        key = client.admin.own_key()
    save_login(wanted)
    _tell(wanted.url, f"login, saved in {login_file()}", key, as_json=as_json)
    if configured_url() != wanted.url:
        say(f"{URL_VARIABLE} is set and wins over the login; unset it to use {wanted.url}.")


def _show_current(*, as_json: bool) -> None:
    from trainmaster.client import Client

    url = configured_url()
    if url is None and local.running() is None:
        told = f"Not logged in; commands use the local server of {local.data_dir()}, which does not run."
        print_result({"url": None, "source": "local server", "key": None}, told, as_json=as_json)
        return
    with Client() as client:
        source = URL_VARIABLE if os.environ.get(URL_VARIABLE) else "login" if url else "local server"
        _tell(client.url, source, client.admin.own_key(), as_json=as_json)


def _tell(url: str, source: str, key: Key, *, as_json: bool) -> None:
    print_result(
        {"url": url, "source": source.partition(",")[0], "key": key},
        f"Server  {url} ({source})",
        f"Key     {key['name']} of account {key['account_id']}, may {', '.join(key['scopes'])}",
        as_json=as_json,
    )


def _read_key() -> str:
    key = typer.prompt("API key", hide_input=True, err=True) if sys.stdin.isatty() else sys.stdin.readline()
    if not key.strip():
        raise UsageError("no API key was given: set TRAINMASTER_API_KEY, or pipe the key into this command")
    return str(key).strip()


def logout(as_json: JsonOption = False) -> None:
    """Forget the server and the key that `trainmaster login` saved. The key itself stays valid."""
    there = login_file().exists()
    remove_login()
    told = "Logged out; commands use the local server again, unless TRAINMASTER_URL is set."
    print_result({"logged_out": there}, told if there else "Not logged in.", as_json=as_json)


def env(as_json: JsonOption = False) -> None:
    """Print the variables by which the public clients of Tinker find this server, with its API key.

    For a shell: eval "$(trainmaster env)"
    """
    with connect() as client:
        client.admin.own_key()  # before a client is sent there, see that the server answers and takes the key
        variables = {"TINKER_BASE_URL": client.url, "TINKER_API_KEY": client.api_key}
    exports = (f"export {name}={shlex.quote(value)}" for name, value in variables.items())
    print_result(variables, *exports, as_json=as_json)
