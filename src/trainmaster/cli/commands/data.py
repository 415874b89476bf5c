"""`trainmaster data`: a look at training data before anything is trained on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli.exits import ExitCode, UsageError, say
from trainmaster.cli.options import JsonOption, SetOption, connect
from trainmaster.cli.output import draw, facts, print_json, styled, waiting

if TYPE_CHECKING:
    from rich.text import Text

    from trainmaster.client.types import CheckedData, CheckedSource, DataSample

CUSTOM = "CUSTOM"
LINES = ("jsonl", "csv")
"""Formats whose rows are told by the lines of their files."""

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
    from trainmaster.cli.job_file import load, set_values
    from trainmaster.client.file_upload import upload_files

    document, base = load(file)
    document = set_values(document, settings)
    if not isinstance(document.get("data_config"), dict):
        raise UsageError(f"{file} has no data_config, so that there is no data to look at")
    with connect() as client:
        shipped = upload_files(client, document, base, weights=False, tell=say)
        training = _object(shipped, "training_config")
        custom = _object(training, "framework").get("type") == CUSTOM
        with waiting("reads and tokenizes rows", quiet=as_json):
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
        draw(styled(source["path"], "bold"), facts(_facts(source, found["max_seq_length"])))
        for sample in source["samples"]:
            draw("", _title(sample, "line" if source["format"] in LINES else "row"), _row(sample))
        for message in _problems(source):
            draw(_wrong(message))
        draw("")
    if found["problem"]:
        draw(_wrong(found["problem"]))
    segments = [each for source in found["sources"] for sample in source["samples"] for each in sample["segments"]]
    if not all(segment["trained"] for segment in segments):
        context = "Dim text" if sys.stdout.isatty() else "What stands in ‹ ›"
        draw(f"{context} is context: the model reads it, and is not trained to write it.")
    if found["ok"]:
        draw(_verdict(found))


def _wrong(message: str) -> Text:
    return styled("").append("error: ", style="bold red").append(message)


def _problems(source: CheckedSource) -> Iterator[str]:
    """What is wrong; the same in many rows is told once."""
    alike: dict[str, list[str]] = {}
    for problem in source["problems"]:
        where, _, what = problem["message"].partition(": ")
        alike.setdefault(what if problem["row"] is not None else where, []).append(problem["message"])
    for first, *more in alike.values():
        yield f"{first} (and {_counted(len(more), 'more row')} alike)" if more else first


def _verdict(found: CheckedData) -> str:
    if lost := sum(source["untrained"] for source in found["sources"]):
        read = sum(source["tokenized"] for source in found["sources"])
        return (
            f"Every row can be read, but {lost:,} of {read:,} have no tokens to train on within "
            f"{found['max_seq_length']:,} tokens. Raise data_config.max_seq_length."
        )
    return "Nothing is wrong with what was read."


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


def _facts(source: CheckedSource, max_seq_length: int | None) -> dict[str, Any]:
    at_least = "" if source["complete"] else "at least "
    kept = "" if source["kept"] == source["rows"] else f", of which the filters keep {source['kept']:,}"
    counts = source["tokens"]
    told: dict[str, Any] = {
        "format": source["format"] and f"{source['format']}, {_counted(source['files'], 'file')}",
        "rows": f"{at_least}{source['rows']:,}{kept}" if source["rows"] else None,
        "columns": ", ".join(source["columns"]),
    }
    if counts:
        told["tokens"] = (
            f"{counts['min']:,} to {counts['max']:,} in a row, median {counts['median']:,}"
            f" (of {_counted(source['tokenized'], 'row')})"
        )
        told["cut off"] = f"{_counted(source['cut'], 'row')}, at {max_seq_length:,} tokens" if source["cut"] else None
        lost = source["untrained"]
        told["not trained"] = f"{_counted(lost, 'row')}, cut before what is learned" if lost else None
    return told


def _title(sample: DataSample, unit: str) -> Text:
    parts = [f"{unit} {sample['row']}"]
    if sample["length"] is not None:
        trained = sum(segment["tokens"] for segment in sample["segments"] if segment["trained"])
        parts += [str(sample["shape"]), f"{sample['length']:,} tokens", f"{trained:,} trained on"]
    if sample["cut"]:
        parts.append("end cut off")
    if sample["samples"] > 1:
        parts.append(f"the first of {sample['samples']} parts")
    return styled("  " + ", ".join(parts), "dim")


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
