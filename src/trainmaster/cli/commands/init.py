"""`trainmaster init`: write a job file to begin with."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trainmaster.cli.exits import UsageError, say
from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import print_json

STDOUT = "-"
DEFAULT_TYPE = "lora"
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
DEFAULT_DATA = "train.jsonl"


def init(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Where to write it; - is the standard output.")] = (
        "job.yaml"
    ),
    training_type: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help=f"What to train: sft, lora, full_finetune, continued_pretrain or dpo; by default {DEFAULT_TYPE}.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help=f"A Hugging Face name, a directory or a URI; by default {DEFAULT_MODEL}."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="PATH", help=f"A file or a URI; by default {DEFAULT_DATA} beside FILE."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a commented job file for a training type and a model. Needs no server.

    On a terminal it asks for what you leave out.
    """
    from trainmaster.cli import job_template

    if file != STDOUT and not force and Path(file).exists():
        raise UsageError(f"{file} is there already; name another file, or replace it with --force")
    base = Path() if file == STDOUT else Path(file).parent
    asks = not as_json and sys.stdin.isatty() and sys.stdout.isatty()
    if training_type is None:
        training_type = _asked_type() if asks else DEFAULT_TYPE
    chosen = job_template.training_type_of(training_type)
    if model is None:
        model = _asked("Base model (a Hugging Face name, a directory or a URI)", DEFAULT_MODEL, asks)
    if data is None:
        data = _asked("Training data (a file or a URI)", str(base / DEFAULT_DATA), asks)
    text = job_template.job_file(
        chosen,
        model=_model_from(base, model),
        data=os.path.relpath(data, base) if _is_relative(data) else data,
        file="job.yaml" if file == STDOUT else file,
        config=_config_of(model),
    )
    if file != STDOUT:
        _write(Path(file), text, force=force)
    if as_json:
        from trainmaster.plain_yaml import parse_yaml

        print_json({"file": None if file == STDOUT else file, "job": parse_yaml(text, file)})
    elif file == STDOUT:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"{file} is written: {chosen} of {model}")
        if _is_relative(data) and not Path(data).exists():
            say(f"Put your data into {data}: rows such as {job_template.rows_of(chosen)}.")
        if "://" not in model and not model.startswith("artifacts:") and not Path(model).is_dir():
            say(f"There is no directory {model} here, so {model} is taken as the name of a model on Hugging Face.")
        quoted = shlex.quote(file)
        say(f"See what the model will learn with `trainmaster data check {quoted}`,")
        say(f"train it with `trainmaster submit {quoted} --follow`.")


def _asked(question: str, default: str, asks: bool) -> str:
    return str(typer.prompt(question, default, err=True)) if asks else default


def _asked_type() -> str:
    from trainmaster.cli.job_template import TYPES

    for name, meaning in TYPES.items():
        say(f"  {name:20}{meaning}")
    return _asked("Training type", DEFAULT_TYPE, True)


def _is_relative(path: str) -> bool:
    return path != "" and "://" not in path and not os.path.isabs(path)


def _model_from(base: Path, path: str) -> str:
    """A model as a file in `base` has to name it: what is no directory here is a name, and a dot marks a directory."""
    if not _is_relative(path) or not Path(path).is_dir():
        return path
    found = os.path.relpath(path, base)
    return found if found.startswith("..") else f"./{found}"


def _config_of(model: str) -> dict[str, Any] | None:
    """The model's configuration, where it is a directory here or in the Hugging Face client's cache."""
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface", "hub"))
    kept = cache.expanduser() / f"models--{model.removeprefix('hf://').replace('/', '--')}" / "snapshots"
    for file in (Path(model.removeprefix("file://"), "config.json"), *sorted(kept.glob("*/config.json"))):
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(file.read_bytes())
            if isinstance(found, dict):
                return found
    return None


def _write(path: Path, text: str, *, force: bool) -> None:
    try:
        with path.open("w" if force else "x") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
