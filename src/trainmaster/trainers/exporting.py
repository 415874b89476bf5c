"""The result of a training: a directory that others can load, whole or not there at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trainmaster.jobs.roots import S3_SCHEME
from trainmaster.protocol import environment
from trainmaster.trainers.document import Document, DocumentError

RESULT = "model"
"""The name of the result in the job's output."""
_DRAFT = ".export-"


def whole_state(model: nn.Module) -> dict[str, Tensor] | None:
    """The weights of a sharded model, gathered on the first rank; None where nothing is sharded. Collective."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.tensor import DTensor

    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return None
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def destination(document: Document) -> str | None:
    """Where the job wants a copy of its result: below `output_path`, by the result's name if it has one.

    Raises:
        DocumentError: this job may not write there.
    """
    path = document.output.output_path
    if path is None:
        return None
    path = path.removeprefix("file://")
    if document.output.output_model_name:
        path = f"{path.rstrip('/')}/{document.output.output_model_name}"
    if path.startswith(S3_SCHEME):
        return path
    place = Path(path).resolve()
    roots = [Path(root).resolve() for root in os.environ.get(environment.DATA_ROOTS, "").split(os.pathsep) if root]
    if not any(place.is_relative_to(root) for root in roots):
        raise DocumentError(f"output_config.output_path: {place} does not lie below a data root of this server")
    return str(place)


def export(
    document: Document,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    output_dir: Path,
    state: Mapping[str, Tensor] | None = None,
) -> str:
    """Write the result into the job's output and, where the job names one, to its own place; says where.

    Args:
        document: what to write, and where to.
        model: the trained model, with its adapter if it has one.
        tokenizer: goes along with it.
        output_dir: the job's output.
        state: the weights, where the model has only a part of them.

    Raises:
        DocumentError: the job names a place that it may not write to.
    """
    wanted = destination(document)
    place = output_dir / RESULT
    with _draft(output_dir) as draft:
        _write(document, model, tokenizer, draft, state)
        _publish(draft, place)
    if wanted is None:
        return str(place)
    if wanted.startswith(S3_SCHEME):
        from trainmaster.jobs.objects import upload

        upload(place, wanted)
    else:
        _copy(place, Path(wanted))
    return wanted


def _write(
    document: Document,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    state: Mapping[str, Tensor] | None,
) -> None:
    if hasattr(model, "peft_config") and document.output.merge_lora:
        model = model.merge_and_unload(safe_merge=True)
    model.save_pretrained(directory, state_dict=None if state is None else dict(state))
    tokenizer.save_pretrained(directory)
    config = directory / "adapter_config.json"
    if config.exists():
        # Where the base model was fetched to means nothing to others.
        adapter = json.loads(config.read_text()) | {"base_model_name_or_path": document.base_model.model_id}
        config.write_text(json.dumps(adapter, indent=2) + "\n")
    for card in directory.glob("README.md"):
        card.unlink()  # a form that nobody has filled in


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _draft(target.parent) as draft:
        shutil.copytree(source, draft)
        _publish(draft, target)


@contextlib.contextmanager
def _draft(parent: Path) -> Iterator[Path]:
    """Where a directory can be made beside its place. What a killed attempt left of one is removed."""
    name = f"{_DRAFT}{os.environ.get(environment.JOB_ID, 'local')}"
    shutil.rmtree(parent / name, ignore_errors=True)
    (parent / name).mkdir()
    try:
        yield parent / name / "new"
    finally:
        shutil.rmtree(parent / name, ignore_errors=True)


def _publish(draft: Path, place: Path) -> None:
    """Make a finished directory the one at `place`: readers see the old one, none, or the new one, never a part."""
    for path in draft.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    _flush_directory(draft)
    if place.exists():
        os.rename(place, draft.with_name("old"))
    os.rename(draft, place)
    _flush_directory(place.parent)


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
