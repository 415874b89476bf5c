"""Commands that choose the server: login, logout, and env for other clients."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import UsageError, say
from trainmaster.cli.options import JsonOption, connect
from trainmaster.cli.output import print_json

if TYPE_CHECKING:
    from trainmaster.client.types import Key


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
    from trainmaster.client.connection import Address
    from trainmaster.client.server_lookup import KEY_VARIABLE, URL_VARIABLE, configured_url, login_file, save_login

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
    from trainmaster.client import Client, local
    from trainmaster.client.server_lookup import URL_VARIABLE, configured_url

    url = configured_url()
    if url is None and local.running() is None:
        if as_json:
            print_json({"url": None, "source": "local server", "key": None})
        else:
            typer.echo(f"Not logged in; commands use the local server of {local.data_dir()}, which does not run.")
        return
    with Client() as client:
        source = URL_VARIABLE if os.environ.get(URL_VARIABLE) else "login" if url else "local server"
        _tell(client.url, source, client.admin.own_key(), as_json=as_json)


def _tell(url: str, source: str, key: Key, *, as_json: bool) -> None:
    if as_json:
        print_json({"url": url, "source": source.partition(",")[0], "key": key})
        return
    typer.echo(f"Server  {url} ({source})")
    typer.echo(f"Key     {key['name']} of account {key['account_id']}, may {', '.join(key['scopes'])}")


def _read_key() -> str:
    asks = sys.stdin.isatty()
    key = typer.prompt("API key", hide_input=True, err=True) if asks else sys.stdin.readline()
    if not key.strip():
        raise UsageError("no API key was given: set TRAINMASTER_API_KEY, or pipe the key into this command")
    return str(key).strip()


def logout(as_json: JsonOption = False) -> None:
    """Forget the server and the key that `trainmaster login` saved. The key itself stays valid."""
    from trainmaster.client.server_lookup import login_file, remove_login

    there = login_file().exists()
    remove_login()
    if as_json:
        print_json({"logged_out": there})
    elif there:
        typer.echo("Logged out; commands use the local server again, unless TRAINMASTER_URL is set.")
    else:
        typer.echo("Not logged in.")


def env(as_json: JsonOption = False) -> None:
    """Print the variables by which the public clients of Tinker find this server, with its API key.

    For a shell: eval "$(trainmaster env)"
    """
    with connect() as client:
        client.admin.own_key()  # before a client is sent there, see that the server answers and takes the key
        variables = {"TINKER_BASE_URL": client.url, "TINKER_API_KEY": client.api_key}
    if as_json:
        print_json(variables)
        return
    for name, value in variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")
