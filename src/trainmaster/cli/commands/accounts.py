"""`trainmaster accounts`: who shares the cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmaster.cli.human_units import age
from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import draw, print_json, table
from trainmaster.cli.session import connect

app = typer.Typer(
    help="Accounts, who share the cluster: list, make, change, remove.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The account.", show_default=False)]


@app.callback()
def _list(context: typer.Context, as_json: JsonOption = False) -> None:
    if context.invoked_subcommand is None:
        show(as_json)


@app.command("list")
def show(as_json: JsonOption = False) -> None:
    """List accounts."""
    with connect() as client:
        found = client.admin.accounts()
    if as_json:
        print_json(found)
        return
    from rich.text import Text

    rows = [
        (
            Text(account["account_id"]),
            Text("" if account["uid"] is None else str(account["uid"])),
            Text(age(account["created_at"])),
        )
        for account in found
    ]
    draw(table(("ACCOUNT", "UID", "AGE"), rows, right=("UID",)))


@app.command("create")
def create(
    name: NameArgument,
    uid: Annotated[
        int | None, typer.Option("--uid", min=1, help="The system's user as whom its jobs run on the server.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make an account."""
    with connect() as client:
        account = client.admin.create_account(name, uid=uid)
    if as_json:
        print_json(account)
        return
    typer.echo(f"Account {name} is made; give it a key with `trainmaster keys create --account {name} --name ...`")
    if account["uid"] is None:
        typer.echo(
            "Its jobs run in containers; as processes they run only if the server has the setting shared_uid, or the "
            f"account gets a user of the system (`trainmaster accounts edit {name} --uid UID`)."
        )


@app.command("edit")
def edit(
    name: NameArgument,
    uid: Annotated[
        int, typer.Option("--uid", min=0, help="The system's user as whom its jobs run on the server; 0 for none.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Say as which of the system's users the jobs of an account run."""
    with connect() as client:
        account = client.admin.set_uid(name, uid or None)
    if as_json:
        print_json(account)
        return
    typer.echo(f"Jobs of account {name} run as {f'uid {uid}' if uid else 'no user in particular'} from now on")


@app.command("remove")
def remove(name: NameArgument, as_json: JsonOption = False) -> None:
    """Remove an account that has neither jobs nor keys."""
    with connect() as client:
        account = client.admin.remove_account(name)
    if as_json:
        print_json(account)
        return
    typer.echo(f"Account {name} is removed")
