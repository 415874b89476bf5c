"""`trainmaster webhooks`: who is told when a job changes its status."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from trainmaster.cli.exits import ExitCode, UsageError
from trainmaster.cli.human_units import clock
from trainmaster.cli.options import JsonOption, connect
from trainmaster.cli.output import draw, print_json, table

WebhookArgument = Annotated[str, typer.Argument(metavar="ID", help="The webhook's id.", show_default=False)]

app = typer.Typer(
    help="Webhooks, told when jobs change their status: list, add, remove, test.",
    invoke_without_command=True,
    rich_markup_mode=None,
)


@app.callback()
def _list(context: typer.Context, as_json: JsonOption = False) -> None:
    if context.invoked_subcommand is not None:
        return
    with connect() as client:
        webhooks = client.webhooks.list()
    if as_json:
        print_json(webhooks)
        return
    if not webhooks:
        typer.echo("No webhooks. Add one with `trainmaster webhooks add URL`.")
        return
    from rich.text import Text

    rows = [
        (
            Text(webhook["webhook_id"]),
            Text(webhook["url"]),
            Text(", ".join(webhook["statuses"]) or "all"),
            Text(clock(webhook["delivered_at"]) if webhook["delivered_at"] else "never", style="dim"),
            Text(str(webhook["failures"] or "")),
            Text(str(webhook["given_up"] or "")),
            Text(webhook["problem"], style="yellow"),
        )
        for webhook in webhooks
    ]
    headings = ("ID", "URL", "STATUSES", "DELIVERED", "FAILURES", "GIVEN UP", "PROBLEM")
    draw(table(headings, rows, wrap=("URL", "STATUSES", "PROBLEM"), right=("FAILURES", "GIVEN UP")))


@app.command("add")
def add(
    url: Annotated[str, typer.Argument(metavar="URL", help="Where events are sent.", show_default=False)],
    status: Annotated[
        list[str], typer.Option("--status", metavar="STATUS", help="Tell of this status alone; may be repeated.")
    ] = [],  # noqa: B006 - typer copies it
    secret_from_env: Annotated[
        str, typer.Option("--secret-from-env", metavar="VAR", help="Sign with the value of this variable.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Tell a URL of every change of status from now on."""
    secret = os.environ.get(secret_from_env) if secret_from_env else None
    if secret_from_env and not secret:
        raise UsageError(f"the variable {secret_from_env} is not set")
    with connect() as client:
        webhook = client.webhooks.create(url, statuses=[each.upper() for each in status], secret=secret)
    if as_json:
        print_json(webhook)
        return
    typer.echo(f"{webhook['webhook_id']} tells {webhook['url']} of {', '.join(webhook['statuses']) or 'every status'}.")
    if not secret:
        typer.echo(f"Its secret, shown this once: {webhook['secret']}")
    typer.echo(f"Try it with `trainmaster webhooks test {webhook['webhook_id']}`.")


@app.command("remove")
def remove(webhook: WebhookArgument, as_json: JsonOption = False) -> None:
    """Take a webhook away; it is told nothing more."""
    with connect() as client:
        client.webhooks.remove(webhook)
    if as_json:
        print_json({"webhook_id": webhook, "removed": True})
    else:
        typer.echo(f"{webhook} is removed.")


@app.command("test")
def try_it(webhook: WebhookArgument, as_json: JsonOption = False) -> None:
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
