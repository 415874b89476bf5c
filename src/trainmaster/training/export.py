"""Exports the result of a training as a model directory, and copies it to the destination that the job names.

A destination is a directory of the server, or a prefix on an object store. What lies there is replaced only if an
earlier training left it. Readers see the old result, none, or the new one: a directory is renamed when it is complete,
and a prefix gets its `config.json` last, without which it is not a model.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trainmaster.jobs import objects
from trainmaster.jobs.checkpoint import flush_path, flush_tree
from trainmaster.protocol import environment
from trainmaster.training import models
from trainmaster.training.document import Document, DocumentError, Prepared
from trainmaster.training.state import plain_name
from trainmaster.training.steps import CredentialsError, SourceUnavailableError

RECORD = "trainmaster.json"
"""The list of a result's files, in the result."""
_LAST = ("config.json", "adapter_config.json", RECORD)
_FIELD = "output_config.output_path"
_DRAFT = ".export-"


def destination(document: Document) -> str | None:
    """The place that the job names for a copy of its result. Raises DocumentError or PreparingError."""
    path = document.output.output_path
    if path is None:
        return None
    path = path.removeprefix("file://")
    if document.output.output_model_name:
        path = f"{path.rstrip('/')}/{document.output.output_model_name}"
    if path.startswith(objects.S3_SCHEME):
        with _reached():
            _earlier_objects(objects.open_place(path))
        return path
    place = Path(path).resolve()
    roots = [Path(root).resolve() for root in os.environ.get(environment.DATA_ROOTS, "").split(os.pathsep) if root]
    if not any(place.is_relative_to(root) for root in roots):
        raise DocumentError(f"{_FIELD}: {place} does not lie below a data root of this server")
    _require_replaceable(place)
    return str(place)


def record(directory: Path) -> None:
    files = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    (directory / RECORD).write_text(_record_of(files))


def publish(result: Path, wanted: str) -> None:
    """Copy a result to its destination. Raises as `destination`."""
    if wanted.startswith(objects.S3_SCHEME):
        with _reached():
            _upload(result, objects.open_place(wanted))
        return
    target = Path(wanted)
    target.parent.mkdir(parents=True, exist_ok=True)
    with drafting(target.parent) as draft:
        shutil.copytree(result, draft)
        _require_replaceable(target)
        place(draft, target)


@contextlib.contextmanager
def drafting(parent: Path) -> Iterator[Path]:
    """A directory beside the target's place, for a draft. What a killed attempt left there is removed."""
    name = f"{_DRAFT}{os.environ.get(environment.JOB_ID, 'local')}"
    shutil.rmtree(parent / name, ignore_errors=True)
    (parent / name).mkdir()
    try:
        yield parent / name / "new"
    finally:
        shutil.rmtree(parent / name, ignore_errors=True)


def place(draft: Path, target: Path) -> None:
    """Rename a finished directory to `target`: readers see the old one, none, or the new one, never a part."""
    flush_tree(draft)
    if target.exists():
        os.rename(target, draft.with_name("old"))
    os.rename(draft, target)
    flush_path(target.parent)


def _require_replaceable(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise DocumentError(f"{_FIELD}: {target} is a file; name a directory")
    found = [
        path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir() or path.is_symlink()
    ]
    text = (target / RECORD).read_text() if (target / RECORD).is_file() else None
    _require_of_a_result(found, text, str(target))


def _earlier_objects(place: objects.ObjectPlace) -> list[str]:
    keys = [meta["path"] for meta in objects.listing(place, place.key)]
    text = objects.get(place, place.below(RECORD))[0].decode() if place.below(RECORD) in keys else None
    _require_of_a_result([key.removeprefix(place.below("")).strip("/") for key in keys], text, place.uri)
    return keys


def _require_of_a_result(found: Collection[str], text: str | None, shown: str) -> None:
    """Refuse to replace anything that an earlier training did not leave, by its own record."""
    try:
        ours = {RECORD, *json.loads(text)["files"]} if text is not None else set()
    except (KeyError, TypeError, ValueError):
        ours = set()
    if foreign := sorted(set(found) - ours):
        raise DocumentError(
            f"{_FIELD}: {shown} holds {foreign[0]}, which no training left there, and would be replaced; name a place "
            "where nothing is, or put the result below it with output_config.output_model_name"
        )


def _upload(result: Path, place: objects.ObjectPlace) -> None:
    earlier = _earlier_objects(place)
    files = {path: place.below(path.relative_to(result).as_posix()) for path in result.rglob("*") if path.is_file()}
    # From now on the place is ours, complete or not: another attempt may replace it.
    names = [key.removeprefix(place.below("")).strip("/") for key in {*earlier, *files.values()}]
    objects.put(place, place.below(RECORD), _record_of(sorted(names)).encode())
    objects.delete(place, [key for key in earlier if key != place.below(RECORD)])
    objects.send_all(place, {path: key for path, key in files.items() if path.name not in _LAST})
    for name in _LAST:
        if (result / name).is_file():
            objects.send_all(place, {result / name: place.below(name)})


def _record_of(files: list[str]) -> str:
    return json.dumps({"files": files}, indent=1) + "\n"


@contextlib.contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except objects.AccessRefusedError as error:
        advice = "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in training_config.environment"
        raise CredentialsError(f"{_FIELD}: {error}; {advice}") from error
    except objects.ObjectStoreError as error:
        raise SourceUnavailableError(f"{_FIELD}: {error}") from error
    except ImportError as error:
        raise DocumentError(f"{_FIELD}: {error}") from error


RESULT = "model"

State = Mapping[str, Tensor]


def whole_state(model: nn.Module) -> State | None:
    """Gather the weights of a sharded model, or of its adapter, on the first rank; None: not sharded. Collective."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.tensor import DTensor

    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return None
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=_has_adapter(model))
    state = get_model_state_dict(model, options=options)
    # Tied weights, such as those of embedding and output, have several names in it.
    once, all_names = (
        {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=removed)} for removed in (True, False)
    )
    return {name: value for name, value in state.items() if name not in all_names - once and isinstance(value, Tensor)}


def export(
    document: Document,
    prepared: Prepared,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    output_dir: Path,
    state: State | None = None,
) -> str:
    """Write the result, and copy it where the job wants it; returns where. `state`: the weights of a sharded model."""
    result = output_dir / RESULT
    with drafting(output_dir) as draft:
        _write(document, prepared, model, tokenizer, draft, state)
        record(draft)
        place(draft, result)
    if (wanted := destination(document)) is None:
        return str(result)
    publish(result, wanted)
    return wanted


def _write(
    document: Document,
    prepared: Prepared,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    state: State | None,
) -> None:
    if _has_adapter(model) and document.output.merge_lora:
        if state is not None:
            model, state = _with_adapter(document, prepared, state), None
        model = model.merge_and_unload(safe_merge=True)
    model.save_pretrained(directory, state_dict=None if state is None else dict(state))
    tokenizer.save_pretrained(directory)
    config = directory / "adapter_config.json"
    if config.exists():
        # The path of the fetched base model means nothing elsewhere.
        adapter = json.loads(config.read_text()) | {"base_model_name_or_path": document.training.base_model.model_id}
        config.write_text(json.dumps(adapter, indent=2) + "\n")
    for card in directory.glob("README.md"):
        card.unlink()  # an empty template


def _with_adapter(document: Document, prepared: Prepared, state: State) -> nn.Module:
    """Load the base model again, with the trained adapter: this rank has only a shard of the trained one."""
    from peft import get_peft_model

    base = models.load_model(document, prepared, trains_base=False)
    model = get_peft_model(base, models.lora_config(document.hyperparameters))
    unexpected = model.load_state_dict(state, strict=False).unexpected_keys
    if unexpected:
        raise RuntimeError(f"the adapter has no place for {unexpected[0]}")
    return model


def _has_adapter(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")
