"""`trainmaster nodes`: the machines, and what is free on them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import typer

from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import draw, print_json, table
from trainmaster.cli.session import connect

if TYPE_CHECKING:
    from trainmaster.sdk.types import Amount, Node


def run(as_json: JsonOption = False) -> None:
    """List the machines, and what is free on them."""
    with connect() as client:
        nodes = list(client.nodes())
    if as_json:
        print_json(nodes)
        return
    if not nodes:
        typer.echo("No nodes yet.")
        return
    from rich.text import Text

    rows = [
        (
            Text(node["id"]),
            Text(node["state"], style="green" if node["state"] == "READY" else "yellow"),
            Text(node["backend"]),
            Text(_gpus(node)),
            Text(f"{node['cpu_cores']['free']} of {node['cpu_cores']['total']}"),
            Text(_gib(node["ram_mb"])),
            Text(_gib(node["storage_mb"])),
            Text(", ".join(node["jobs"])),
            Text(", ".join(node["labels"]), style="dim"),
        )
        for node in nodes
    ]
    headings = ("NODE", "STATE", "BACKEND", "FREE: GPUS", "CORES", "MEMORY", "DISK", "JOBS", "LABELS")
    draw(table(headings, rows, cut=("JOBS", "LABELS"), wrap=("FREE: GPUS",)))


def _gpus(node: Node) -> str:
    every: Counter[str] = Counter(gpu["type"] for gpu in node["gpus"])
    free: Counter[str] = Counter(gpu["type"] for gpu in node["gpus"] if gpu["free"])
    return ", ".join(f"{free[kind]} of {count} {kind}" for kind, count in every.items()) or "none"


def _gib(amount: Amount) -> str:
    return f"{amount['free'] / 1024:.1f} of {amount['total'] / 1024:.1f} GiB"
