"""`trainmaster data`: a look at training data before anything is trained on it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli.exits import ExitCode, UsageError, say
from trainmaster.cli.options import JsonOption, SetOption
from trainmaster.cli.output import draw, facts, print_json
from trainmaster.cli.session import connect

if TYPE_CHECKING:
    from rich.text import Text

    from trainmaster.sdk.data import CheckedData, CheckedSource, DataSample

CUSTOM = "CUSTOM"

app = typer.Typer(help="Training data: check what a model will see of it.", rich_markup_mode=None)


@app.callback()
def _data() -> None:
    """Training data."""


@app.command("check")
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A job file, YAML or JSON; - is the standard input.")],
    settings: SetOption = [],  # noqa: B006 - typer copies it
    rows: Annotated[int, typer.Option("--rows", min=0, max=100, help="How many rows of each source are shown.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Read real rows and show what the model will see of them, or say which row is wrong. Then the exit code is 1.

    Bright text is trained on; what stands in ‹ › is context, which the model reads and is not trained to write.
    """
    from trainmaster.cli.jobfile import load, set_values
    from trainmaster.sdk.shipping import ship

    document, base = load(file)
    document = set_values(document, settings)
    if not isinstance(document.get("data_config"), dict):
        raise UsageError(f"{file} has no data_config, so that there is no data to look at")
    with connect() as client:
        shipped = ship(client, document, base, tell=say)
        training = _object(shipped, "training_config")
        custom = _object(training, "framework").get("type") == CUSTOM
        found = client.data.validate(
            shipped["data_config"],
            # What a script of one's own makes of rows is its own affair.
            base_model=None if custom else training.get("base_model"),
            training_type=training.get("training_type") or "SFT",
            hyperparameters=None if custom else training.get("hyperparameters"),
            environment=training.get("environment"),
            files=_object(shipped, "workload").get("files") or (),
            limit=rows,
        )
    if as_json:
        print_json(found)
    else:
        _show(found)
    if not found["ok"]:
        raise typer.Exit(ExitCode.REFUSED)


def _object(document: Any, name: str) -> dict[str, Any]:
    value = document.get(name) if isinstance(document, dict) else None
    return value if isinstance(value, dict) else {}


def _show(found: CheckedData) -> None:
    for source in found["sources"]:
        draw(_heading(source), facts(_facts(source, found["max_seq_length"])))
        for sample in source["samples"]:
            draw("", _title(sample), _row(sample))
        for problem in source["problems"]:
            draw(_wrong(problem["message"]))
        draw("")
    if found["problem"]:
        draw(_wrong(found["problem"]))
    if found["ok"]:
        draw("Nothing is wrong with what was read.")


def _heading(source: CheckedSource) -> Text:
    from rich.text import Text

    return Text(source["path"], style="bold")


def _wrong(message: str) -> Text:
    from rich.text import Text

    return Text.assemble(("error: ", "bold red"), message)


def _facts(source: CheckedSource, max_seq_length: int | None) -> dict[str, Any]:
    at_least = "" if source["complete"] else "at least "
    kept = "" if source["kept"] == source["rows"] else f", of which the filters keep {source['kept']:,}"
    counts = source["tokens"]
    told: dict[str, Any] = {
        "format": source["format"] and f"{source['format']}, {source['files']} file{'s' * (source['files'] != 1)}",
        "rows": f"{at_least}{source['rows']:,}{kept}" if source["rows"] else None,
        "columns": ", ".join(source["columns"]),
    }
    if counts:
        told["tokens"] = (
            f"{counts['min']:,} to {counts['max']:,} in a row, median {counts['median']:,}"
            f" (of {source['tokenized']:,} rows)"
        )
        told["cut off"] = f"{source['cut']:,} rows, at {max_seq_length:,} tokens" if source["cut"] else None
        told["not trained"] = f"{source['untrained']:,} rows, of which nothing is left" if source["untrained"] else None
    return told


def _title(sample: DataSample) -> Text:
    from rich.text import Text

    parts = [f"row {sample['row']}"]
    if sample["length"] is not None:
        trained = sum(segment["tokens"] for segment in sample["segments"] if segment["trained"])
        parts += [str(sample["shape"]), f"{sample['length']:,} tokens", f"{trained:,} trained on"]
    if sample["cut"]:
        parts.append("end cut off")
    if sample["samples"] > 1:
        parts.append(f"the first of {sample['samples']} parts")
    return Text("  " + ", ".join(parts), style="dim")


def _row(sample: DataSample) -> Text:
    """The text of a row: what is trained on stands out by colour, and in a pipe by the brackets around the rest."""
    from rich.text import Text

    if sample["values"] is not None:
        return Text("  " + sample["values"])
    text = Text()
    for segment in sample["segments"]:
        if segment["trained"]:
            text.append(segment["text"], style="bold green")
        elif sys.stdout.isatty():
            text.append(segment["text"], style="dim")
        else:
            text.append(f"‹{segment['text']}›")
    return Text("\n").join([Text("  ") + line for line in text.split("\n", allow_blank=True)])
