"""`trainmaster runtimes`: what `TrainerClient.train(runtime=...)` can name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli.exits import CommandError
from trainmaster.cli.options import JsonOption, connect
from trainmaster.cli.output import draw, print_json, table

if TYPE_CHECKING:
    from trainmaster.trainer.runtimes import TrainingRuntime


def runtimes(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Show the file of this one.", show_default=False)] = "",
    as_json: JsonOption = False,
) -> None:
    """List training runtimes, the server's and the built-in ones; or show the file of one."""
    from trainmaster.trainer.runtimes import RuntimeCatalog

    with connect() as client:
        catalog = RuntimeCatalog(client)
        if not name:
            _list([_summary(runtime) for runtime in catalog.definitions()], as_json)
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


def _summary(runtime: TrainingRuntime) -> dict[str, Any]:
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


def _list(runtimes: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(runtimes)
        return
    from rich.text import Text

    rows = [
        (
            Text(runtime["name"]),
            Text(runtime["framework"]),
            Text(runtime["trainer"]),
            Text(str(runtime["num_nodes"])),
            Text(runtime["image"] or ""),
            Text(runtime["pretrained_model"] or ""),
            Text(runtime["origin"], style="dim"),
        )
        for runtime in runtimes
    ]
    headings = ("RUNTIME", "FRAMEWORK", "TRAINER", "NODES", "IMAGE", "MODEL", "FROM")
    draw(table(headings, rows, right=("NODES",), cut=("IMAGE", "MODEL", "FROM"), spare=("FROM",)))
