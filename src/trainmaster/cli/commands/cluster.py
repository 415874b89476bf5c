"""Commands for the cluster's nodes (list, show, label, drain, enable) and for its training runtimes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli.exits import CommandError, UsageError, say
from trainmaster.cli.options import JsonOption, connect
from trainmaster.cli.output import age, clock, draw, facts, print_json, print_list, print_result, styled, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from trainmaster.client import Client
    from trainmaster.client.types import Amount, Node, NodeEvent
    from trainmaster.trainer.runtimes import TrainingRuntime

EVENTS = 10
SPARE = ("LABELS", "BACKEND", "DISK", "MEMORY", "JOBS", "CORES")
"""What a narrow list does without; `nodes NODE` has it."""


def nodes(
    node: Annotated[
        str | None, typer.Argument(metavar="[NODE]", help="Show this one, with what happened to it.")
    ] = None,
    label: Annotated[
        list[str], typer.Option("--label", "-l", metavar="K=V", help="Give it this label; may be repeated.")
    ] = [],  # noqa: B006 - typer copies it
    unlabel: Annotated[list[str], typer.Option("--unlabel", metavar="K=V", help="Remove this label.")] = [],  # noqa: B006
    capability: Annotated[
        list[str], typer.Option("--capability", metavar="TAG", help="Give it this capability; may be repeated.")
    ] = [],  # noqa: B006
    no_capability: Annotated[
        list[str], typer.Option("--no-capability", metavar="TAG", help="Remove this capability.")
    ] = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """List the machines and what is free on them; show one, or change its labels and capabilities."""
    changing = any((label, unlabel, capability, no_capability))
    if changing and node is None:
        raise UsageError("name the node whose labels or capabilities are to be changed")
    with connect() as client:
        if node is None:
            print_list(
                client.cluster.nodes(),
                ("NODE", "STATE", "BACKEND", "FREE: GPUS", "BROKEN", "CORES", "MEMORY", "DISK", "JOBS", "LABELS"),
                _row,
                as_json=as_json,
                if_none="No nodes yet.",
                cut=("JOBS", "LABELS"),
                wrap=("STATE", "FREE: GPUS", "BROKEN"),
                spare=SPARE,
            )
            return
        if changing:
            found = _change(client, node, label, unlabel, capability, no_capability)
        else:
            found = client.cluster.node(node)
        if as_json:
            print_json(found)
        else:
            draw(*_parts(found, client.cluster.node_events(node, limit=EVENTS)))


def state_text(node: Node) -> Text:
    style = {"READY": "green", "OFFLINE": "red"}.get(node["state"], "yellow")
    reason = f" ({node['drain_reason']})" if node["drain_reason"] else ""
    return styled(node["state"], style).append(reason, style="dim")


def _row(node: Node) -> tuple[str | Text, ...]:
    broken = ", ".join(f"GPU {gpu['index']}: {gpu['problem']}" for gpu in node["gpus"] if not gpu["healthy"])
    return (
        node["id"],
        state_text(node),
        node["backend"],
        _gpus(node),
        styled(broken, "red"),
        f"{node['cpu_cores']['free']} of {node['cpu_cores']['total']}",
        _gib(node["ram_mb"]),
        _gib(node["storage_mb"]),
        ", ".join(node["jobs"]),
        styled(", ".join(dict.fromkeys((*node["labels"], *node["capabilities"]))), "dim"),
    )


def _change(
    client: Client,
    node: str,
    label: Sequence[str],
    unlabel: Sequence[str],
    capability: Sequence[str],
    no_capability: Sequence[str],
) -> Node:
    before = client.cluster.node(node)
    for name, reported in ((unlabel, before["given_labels"]), (no_capability, before["given_capabilities"])):
        for each in name:
            if each not in reported:
                raise UsageError(f"no operator set '{each}' on {node}; set are: {', '.join(reported) or 'none'}")
    return client.cluster.change_node(
        node,
        labels=_changed(before["given_labels"], label, unlabel),
        capabilities=_changed(before["given_capabilities"], capability, no_capability),
    )


def _changed(before: Sequence[str], add: Sequence[str], remove: Sequence[str]) -> list[str] | None:
    return list(dict.fromkeys((*(name for name in before if name not in remove), *add))) if add or remove else None


def _parts(node: Node, events: Sequence[NodeEvent]) -> Iterator[RenderableType]:
    yield styled(node["id"], "bold").append("  ").append_text(state_text(node))
    yield facts(
        {
            "host": node["hostname"],
            "backend": node["backend"],
            "GPUs free": _gpus(node),
            "cores free": f"{node['cpu_cores']['free']} of {node['cpu_cores']['total']}",
            "memory free": _gib(node["ram_mb"]),
            "disk free": _gib(node["storage_mb"]),
            "slots free": f"{node['slots']['free']} of {node['slots']['total']}",
            "your jobs": ", ".join(node["jobs"]),
            "labels": ", ".join(_marked(node["labels"], node["given_labels"])),
            "capabilities": ", ".join(_marked(node["capabilities"], node["given_capabilities"])),
            "seen": clock(node["last_heartbeat"]),
        }
    )
    for gpu in node["gpus"]:
        if not gpu["healthy"]:
            yield styled(f"  GPU {gpu['index']} ({gpu['type']}) is not schedulable: {gpu['problem']}", "red")
    if events:
        yield ""
        rows = [(age(event["ts"]), event["type"], event["message"]) for event in events]
        yield table(("  AGO", "EVENT", "WHAT HAPPENED"), rows, right=("  AGO",), wrap=("WHAT HAPPENED",))


def _marked(names: Sequence[str], given: Sequence[str]) -> list[str]:
    return [f"{name} (given)" if name in given else name for name in names]


def _gpus(node: Node) -> str:
    every: Counter[str] = Counter(gpu["type"] for gpu in node["gpus"])
    free: Counter[str] = Counter(gpu["type"] for gpu in node["gpus"] if gpu["free"])
    return ", ".join(f"{free[kind]} of {count} {kind}" for kind, count in every.items()) or "none"


def _gib(amount: Amount) -> str:
    return f"{amount['free'] / 1024:.1f} of {amount['total'] / 1024:.1f} GiB"


LOOK_EVERY_S = 1.0


def drain(
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
    """Give a node no more work; what runs there continues, unless you say --force."""
    if grace_seconds is not None and not force:
        raise UsageError("--grace-seconds is about what --force stops; without it, jobs run to their end")
    with connect() as client:
        found = client.cluster.drain(node, reason=reason, force=force, grace_seconds=grace_seconds)
        if wait:
            found = _wait_until_drained(client, found)
    print_result(found, _drain_message(found), as_json=as_json)


def _wait_until_drained(client: Client, node: Node) -> Node:
    told = -1
    while node["state"] == "DRAINING":
        held = node["slots"]["total"] - node["slots"]["free"]
        if held != told:
            told = held
            say(f"{_jobs_running(held)} on {node['id']}; waiting")
        time.sleep(LOOK_EVERY_S)
        node = client.cluster.node(node["id"])
    return node


def _drain_message(node: Node) -> str:
    if node["state"] == "DRAINED":
        return f"{node['id']} is drained: nothing runs there."
    if node["state"] != "DRAINING":
        return f"{node['id']} was enabled again: it is {node['state']}."
    held = node["slots"]["total"] - node["slots"]["free"]
    what = " until preempted" if node["drain_force"] else " to the end"
    return f"{node['id']} takes no more work; {_jobs_running(held)} there{what if held else ''}."


def _jobs_running(held: int) -> str:
    return "nothing runs" if not held else f"{held} {'job runs' if held == 1 else 'jobs run'}"


def enable(
    node: Annotated[str, typer.Argument(metavar="NODE", help="As `trainmaster nodes` lists it.")],
    as_json: JsonOption = False,
) -> None:
    """Give a drained node work again."""
    with connect() as client:
        found = client.cluster.enable(node)
    later = f"is {found['state']}: it accepts jobs when it is seen again."
    print_result(found, f"{found['id']} {'accepts jobs.' if found['state'] == 'READY' else later}", as_json=as_json)


def runtimes(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Show the file of this one.", show_default=False)] = "",
    as_json: JsonOption = False,
) -> None:
    """List training runtimes, the server's and the built-in ones; or show the file of one."""
    from trainmaster.trainer.runtimes import RuntimeCatalog

    with connect() as client:
        catalog = RuntimeCatalog(client)
        if not name:
            summaries = [_runtime_summary(runtime) for runtime in catalog.definitions()]
            headings = ("RUNTIME", "FRAMEWORK", "TRAINER", "NODES", "IMAGE", "MODEL", "FROM")
            cut, spare = ("IMAGE", "MODEL", "FROM"), ("FROM",)
            print_list(summaries, headings, _runtime_row, as_json=as_json, right=("NODES",), cut=cut, spare=spare)
            return
        try:
            document = dict(catalog.definition(name).document)
        except ValueError as error:
            raise CommandError(str(error)) from error
    if as_json:
        print_json(document)
        return
    from trainmaster.plain_yaml import dump_yaml

    typer.echo(dump_yaml(document), nl=False)


def _runtime_summary(runtime: TrainingRuntime) -> dict[str, Any]:
    return {
        "name": runtime.name,
        "framework": runtime.framework,
        "trainer": runtime.trainer_type.value,
        "training_type": runtime.training_type,
        "num_nodes": runtime.num_nodes,
        "ranks_per_node": runtime.ranks_per_node,
        "resources_per_node": dict(runtime.resources),
        "image": runtime.image,
        "packages": list(runtime.packages),
        "pretrained_model": runtime.pretrained_model,
        "origin": runtime.origin,
    }


def _runtime_row(runtime: dict[str, Any]) -> tuple[str | Text, ...]:
    return (
        runtime["name"],
        runtime["framework"],
        runtime["trainer"],
        str(runtime["num_nodes"]),
        runtime["image"] or "",
        runtime["pretrained_model"] or "",
        styled(runtime["origin"], "dim"),
    )
