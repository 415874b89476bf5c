"""`trainmaster drain`: give a node no more work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import UsageError, say
from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import print_json
from trainmaster.cli.session import connect

if TYPE_CHECKING:
    from trainmaster.client import Client
    from trainmaster.client.types import Node

LOOK_EVERY_S = 1.0


def run(
    node: Annotated[str, typer.Argument(metavar="NODE", help="As `trainmaster nodes` lists it.")],
    reason: Annotated[str, typer.Option("--reason", help="Why; shown to those whose jobs wait for it.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Preempt what runs there, instead of waiting for it.")] = False,
    grace_seconds: Annotated[
        float | None,
        typer.Option("--grace-seconds", min=0, metavar="S", help="With --force: how long those get to save."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when nothing runs there any more.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Give a node no more work; what runs there goes on, unless it is forced."""
    if grace_seconds is not None and not force:
        raise UsageError("--grace-seconds is about what --force stops; without it, jobs run to their end")
    with connect() as client:
        found = client.cluster.drain(node, reason=reason, force=force, grace_seconds=grace_seconds)
        if wait:
            found = _wait(client, found)
    if as_json:
        print_json(found)
    else:
        typer.echo(_told(found))


def _wait(client: Client, node: Node) -> Node:
    told = -1
    while node["state"] == "DRAINING":
        held = node["slots"]["total"] - node["slots"]["free"]
        if held != told:
            told = held
            say(f"{_running(held)} on {node['id']}; waiting")
        time.sleep(LOOK_EVERY_S)
        node = client.cluster.node(node["id"])
    return node


def _told(node: Node) -> str:
    if node["state"] == "DRAINED":
        return f"{node['id']} is drained: nothing runs there."
    if node["state"] != "DRAINING":
        return f"{node['id']} was enabled again: it is {node['state']}."
    held = node["slots"]["total"] - node["slots"]["free"]
    what = " until preempted" if node["drain_force"] else " to the end"
    return f"{node['id']} takes no more work; {_running(held)} there{what if held else ''}."


def _running(held: int) -> str:
    return "nothing runs" if not held else f"{held} {'job runs' if held == 1 else 'jobs run'}"
