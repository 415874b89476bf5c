"""Commands for accounts, their API keys and their webhooks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import ExitCode, UsageError, say
from trainmaster.cli.options import JsonOption, connect
from trainmaster.cli.output import age, clock, print_json, print_list, print_result, styled

if TYPE_CHECKING:
    from rich.text import Text

    from trainmaster.client.types import Account, Key, Webhook

accounts_app = typer.Typer(
    help="Accounts, who share the cluster: list, make, change, remove.",
    invoke_without_command=True,
    rich_markup_mode=None,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The account.", show_default=False)]


@accounts_app.callback()
def _accounts(context: typer.Context, as_json: JsonOption = False) -> None:
    if context.invoked_subcommand is None:
        list_accounts(as_json)


@accounts_app.command("list")
def list_accounts(as_json: JsonOption = False) -> None:
    """List accounts."""
    with connect() as client:
        found = client.admin.accounts()
    print_list(found, ("ACCOUNT", "UID", "AGE"), _account_row, as_json=as_json, right=("UID",))


def _account_row(account: Account) -> tuple[str, ...]:
    return account["account_id"], str(account["uid"] or ""), age(account["created_at"])


@accounts_app.command("create")
def create_account(
    name: NameArgument,
    uid: Annotated[int | None, typer.Option("--uid", min=1, help="The uid that runs its jobs on the server.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Create an account."""
    with connect() as client:
        account = client.admin.create_account(name, uid=uid)
    lines = [f"Account {name} is created; give it a key with `trainmaster keys create --account {name} --name ...`"]
    if account["uid"] is None:
        lines.append(
            "Its jobs run in containers; as processes they run only if the server has the setting shared_uid, or the "
            f"account gets a user of the system (`trainmaster accounts edit {name} --uid UID`)."
        )
    print_result(account, *lines, as_json=as_json)


@accounts_app.command("edit")
def edit_account(
    name: NameArgument,
    uid: Annotated[int, typer.Option("--uid", min=0, help="The uid that runs its jobs on the server; 0 for none.")],
    as_json: JsonOption = False,
) -> None:
    """Set the uid that runs the jobs of an account."""
    with connect() as client:
        account = client.admin.set_uid(name, uid or None)
    how = f"run as uid {uid} from now on" if uid else "have no uid of their own from now on"
    print_result(account, f"Jobs of account {name} {how}", as_json=as_json)


@accounts_app.command("remove")
def remove_account(name: NameArgument, as_json: JsonOption = False) -> None:
    """Remove an account that has neither jobs nor keys."""
    with connect() as client:
        print_result(client.admin.remove_account(name), f"Account {name} is removed", as_json=as_json)


keys_app = typer.Typer(help="API keys: list, make, revoke.", invoke_without_command=True, rich_markup_mode=None)


@keys_app.callback()
def _keys(context: typer.Context, as_json: JsonOption = False) -> None:
    if context.invoked_subcommand is None:
        list_keys(every=False, as_json=as_json)


@keys_app.command("create")
def create_key(
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
    """Create an API key. It is shown once: keep it."""
    wanted = [scope.strip() for scope in scopes.split(",") if scope.strip()]
    with connect() as client:
        made = client.admin.create_key(name, scopes=wanted, account_id=account, prefix=prefix)
    if not as_json:
        say(f"{made['key_id']} of account {made['account_id']} may: {', '.join(made['scopes'])}. This is shown once:")
    print_result(made, made["key"], as_json=as_json)


@keys_app.command("list")
def list_keys(
    every: Annotated[bool, typer.Option("--all", "-a", help="Revoked ones too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List API keys; never the keys themselves."""
    with connect() as client:
        keys = client.admin.keys()
    found = [key for key in keys if every or not key["revoked_at"]]
    headings = ("KEY", "ACCOUNT", "NAME", "SCOPES", "AGE", "REVOKED", "MADE BY")
    print_list(found, headings, _key_row, as_json=as_json, cut=("NAME",), spare=("MADE BY", "AGE"))


@keys_app.command("revoke")
def revoke_key(
    key_ids: Annotated[list[str], typer.Argument(metavar="KEY_ID...", help="As `keys list` shows them.")],
    as_json: JsonOption = False,
) -> None:
    """Revoke API keys, for good. Other servers on the same database follow within 5 s."""
    with connect() as client:
        revoked = [client.admin.revoke_key(key_id) for key_id in key_ids]
    print_result(revoked, *(f"{key['key_id']} ({key['name']}) is revoked" for key in revoked), as_json=as_json)


def _key_row(key: Key) -> tuple[str | Text, ...]:
    return (
        key["key_id"],
        key["account_id"],
        key["name"],
        ",".join(key["scopes"]),
        age(key["created_at"]),
        styled(f"{age(key['revoked_at'])} ago" if key["revoked_at"] else "", "red"),
        styled(key["created_by"], "dim"),
    )


WebhookArgument = Annotated[str, typer.Argument(metavar="ID", help="The webhook's id.", show_default=False)]

webhooks_app = typer.Typer(
    help="Webhooks, called when the status of a job changes: list, add, remove, test.",
    invoke_without_command=True,
    rich_markup_mode=None,
)


@webhooks_app.callback()
def list_webhooks(context: typer.Context, as_json: JsonOption = False) -> None:
    if context.invoked_subcommand is not None:
        return
    with connect() as client:
        webhooks = client.webhooks.list()
    print_list(
        webhooks,
        ("ID", "URL", "STATUSES", "DELIVERED", "FAILURES", "GIVEN UP", "PROBLEM"),
        _webhook_row,
        as_json=as_json,
        if_none="No webhooks. Add one with `trainmaster webhooks add URL`.",
        wrap=("URL", "STATUSES", "PROBLEM"),
        right=("FAILURES", "GIVEN UP"),
    )


def _webhook_row(webhook: Webhook) -> tuple[str | Text, ...]:
    return (
        webhook["webhook_id"],
        webhook["url"],
        ", ".join(webhook["statuses"]) or "all",
        styled(clock(webhook["delivered_at"]) or "never", "dim"),
        str(webhook["failures"] or ""),
        str(webhook["given_up"] or ""),
        styled(webhook["problem"], "yellow"),
    )


@webhooks_app.command("add")
def add_webhook(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where events are sent.", show_default=False)],
    status: Annotated[
        list[str], typer.Option("--status", metavar="STATUS", help="Only this status; may be repeated.")
    ] = [],  # noqa: B006 - typer copies it
    secret_from_env: Annotated[
        str, typer.Option("--secret-from-env", metavar="VAR", help="Sign with the value of this variable.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Send every change of status to a URL from now on."""
    secret = os.environ.get(secret_from_env) if secret_from_env else None
    if secret_from_env and not secret:
        raise UsageError(f"the variable {secret_from_env} is not set")
    with connect() as client:
        webhook = client.webhooks.create(url, statuses=[each.upper() for each in status], secret=secret)
    print_result(
        webhook,
        f"{webhook['webhook_id']} tells {webhook['url']} of {', '.join(webhook['statuses']) or 'every status'}.",
        *([] if secret else [f"Its secret, shown this once: {webhook['secret']}"]),
        f"Try it with `trainmaster webhooks test {webhook['webhook_id']}`.",
        as_json=as_json,
    )


@webhooks_app.command("remove")
def remove_webhook(webhook: WebhookArgument, as_json: JsonOption = False) -> None:
    """Remove a webhook; it receives nothing more."""
    with connect() as client:
        client.webhooks.remove(webhook)
    print_result({"webhook_id": webhook, "removed": True}, f"{webhook} is removed.", as_json=as_json)


@webhooks_app.command("test")
def try_webhook(webhook: WebhookArgument, as_json: JsonOption = False) -> None:
    """Send a webhook a test event now. Exits with 1 when it is not taken."""
    with connect() as client:
        trial = client.webhooks.test(webhook)
    if as_json:
        print_json(trial)
    elif trial["delivered"]:
        typer.echo(f"The receiver answered with {trial['status_code']}.")
    else:
        typer.echo(f"The test event was not taken: {trial['problem']}", err=True)
    if not trial["delivered"]:
        raise typer.Exit(ExitCode.REFUSED)
