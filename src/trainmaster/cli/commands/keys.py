"""`trainmaster keys`: make, list and revoke API keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import say
from trainmaster.cli.human_units import age
from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import draw, print_json, table
from trainmaster.cli.session import connect

if TYPE_CHECKING:
    from rich.text import Text

    from trainmaster.client.admin import Key

app = typer.Typer(
    help="API keys: list, make, revoke.",
    invoke_without_command=True,
    rich_markup_mode=None,
)


@app.callback()
def _list(context: typer.Context, as_json: JsonOption = False) -> None:
    if context.invoked_subcommand is None:
        show(every=False, as_json=as_json)


@app.command("create")
def create(
    name: Annotated[str, typer.Option("--name", help="Whose or what it is for; jobs show it as their creator.")],
    account: Annotated[str | None, typer.Option("--account", help="By default that of your own key.")] = None,
    scopes: Annotated[
        str, typer.Option("--scopes", help="What it may do: view, manage, cluster_admin, evaluate.")
    ] = "view,manage",
    prefix: Annotated[
        str | None, typer.Option("--prefix", help="What the key begins with, such as tml-; by default eyJ.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make an API key. It is shown once: keep it."""
    wanted = [scope.strip() for scope in scopes.split(",") if scope.strip()]
    with connect() as client:
        made = client.admin.create_key(name, scopes=wanted, account_id=account, prefix=prefix)
    if as_json:
        print_json(made)
        return
    say(f"{made['key_id']} of account {made['account_id']} may: {', '.join(made['scopes'])}. This is shown once:")
    typer.echo(made["key"])


@app.command("list")
def show(
    every: Annotated[bool, typer.Option("--all", "-a", help="Revoked ones too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List API keys; never the keys themselves."""
    with connect() as client:
        keys = client.admin.keys()
    found = [key for key in keys if every or not key["revoked_at"]]
    if as_json:
        print_json(found)
        return
    headings = ("KEY", "ACCOUNT", "NAME", "SCOPES", "AGE", "REVOKED", "MADE BY")
    draw(table(headings, [_row(key) for key in found], cut=("NAME",), spare=("MADE BY", "AGE")))


@app.command("revoke")
def revoke(
    key_ids: Annotated[list[str], typer.Argument(metavar="KEY_ID...", help="As `keys list` shows them.")],
    as_json: JsonOption = False,
) -> None:
    """Revoke API keys, for good. Other servers on the same database follow within 5 s."""
    with connect() as client:
        revoked = [client.admin.revoke_key(key_id) for key_id in key_ids]
    if as_json:
        print_json(revoked)
        return
    for key in revoked:
        typer.echo(f"{key['key_id']} ({key['name']}) is revoked")


def _row(key: Key) -> tuple[Text, ...]:
    from rich.text import Text

    return (
        Text(key["key_id"]),
        Text(key["account_id"]),
        Text(key["name"]),
        Text(",".join(key["scopes"])),
        Text(age(key["created_at"])),
        Text(f"{age(key['revoked_at'])} ago" if key["revoked_at"] else "", style="red"),
        Text(key["created_by"], style="dim"),
    )
