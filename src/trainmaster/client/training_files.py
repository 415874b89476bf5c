"""Files that a training names in its job file: data, models, tokenizers, a script of one's own.

Relative ones lie beside the job file. For the local server they become absolute; any other gets them by content, and
finds them in the job's working directory.
"""

from __future__ import annotations

import copy
import difflib
import glob
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainmaster.client.errors import UploadError

TRAINER = "trainer"
"""The kind of workload that is what training_config and data_config say."""
_FILE_TYPES = ("file", "local")
_LOCAL_STARTS = ("/", "./", "../", "~")
_WILD = frozenset("*?[")
_WEIGHTS = frozenset({".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A field that names something beside the job file."""

    field: str
    place: tuple[str | int, ...]
    """The keys that lead to the field."""
    path: Path
    """Absolute; may be a pattern."""
    target: str
    """What the field says when the files lie in the working directory."""
    files: tuple[tuple[Path, str], ...]
    """What it stands for, and where each goes there."""

    def without_weights(self) -> Named:
        if self.place[-1] != "model_id":
            return self
        return replace(self, files=tuple(each for each in self.files if each[0].suffix not in _WEIGHTS))


def names_training(document: Mapping[str, Any]) -> bool:
    """Whether what runs is said by training_config and data_config, and nobody says where its relative paths lie."""
    workload = document.get("workload")
    if workload is None:
        return True
    return isinstance(workload, Mapping) and workload.get("kind") == TRAINER and not workload.get("working_directory")


def named_files(document: Mapping[str, Any], base: Path) -> list[Named]:
    """The fields of a training that name something beside its job file. ShippingError: it is not there."""
    found: list[Named] = []
    for place, name, certain in _names(document):
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)[1:]
        plain = name.removeprefix("file://")
        if "://" in plain or os.path.isabs(plain):
            continue
        path = Path(os.path.abspath(base / Path(plain).expanduser()))
        target, files = _files(plain, path, f"shipped/{len(found)}")
        if files:
            found.append(Named(field=field, place=place, path=path, target=target, files=tuple(files)))
        elif certain or plain.startswith(_LOCAL_STARTS):
            raise UploadError(nothing_at(field, plain, base))
        elif _looks_like_a_path(plain, base):
            hub = f". If a model of the Hub is meant, write hf://{plain}" if plain.count("/") == 1 else ""
            raise UploadError(nothing_at(field, plain, base) + hub)
    return found


def nothing_at(field: str, path: str, base: Path) -> str:
    place = Path(os.path.abspath(base / Path(path).expanduser()))
    if place.is_dir():
        return f"{field}: the directory {path} has no files that could be sent"
    looked = os.path.abspath(base)
    return f"{field}: there is no such file or directory: {path}; looked in {looked}{did_you_mean(place)}"


def did_you_mean(missing: Path) -> str:
    """The name in the same directory that is most like that of a missing file, as the end of a sentence."""
    near = difflib.get_close_matches(missing.name, [path.name for path in missing.parent.glob("*")], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _looks_like_a_path(name: str, base: Path) -> bool:
    """Whether what could be a name on the Hub is meant as a path: its directory lies here, or it is too deep."""
    first, slash, rest = name.partition("/")
    return bool(slash) and ":" not in first and ("/" in rest or not rest or (base / first).is_dir())


def with_paths(document: Mapping[str, Any], paths: Mapping[tuple[str | int, ...], str]) -> dict[str, Any]:
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    for place, path in paths.items():
        node: Any = changed
        for part in place[:-1]:
            node = node[part]
        # What names a model may also be its name on a hub; these say that it is a path.
        node[place[-1]] = f"./{path}" if place[-1] == "tokenizer_id" and not os.path.isabs(path) else path
        if place[-1] == "model_id":
            node["source"] = "local"
    return changed


def _names(document: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str, bool]]:
    """Every place that may name a file: where it is, what it says, and whether that must be a file."""
    training, data = _mapping(document, "training_config"), _mapping(document, "data_config")
    base_model, preprocess = _mapping(training, "base_model"), _mapping(data, "preprocess")
    script = _mapping(training, "framework").get("custom_script_path")
    if isinstance(script, str):
        yield ("training_config", "framework", "custom_script_path"), script, True
    source = base_model.get("source")
    if isinstance(model := base_model.get("model_id"), str) and source in (None, "local"):
        yield ("training_config", "base_model", "model_id"), model, source == "local"
    if isinstance(tokenizer := base_model.get("tokenizer_id"), str):
        yield ("training_config", "base_model", "tokenizer_id"), tokenizer, False
    if isinstance(tokenizer := preprocess.get("tokenizer_id"), str):
        yield ("data_config", "preprocess", "tokenizer_id"), tokenizer, False
    sources = data.get("sources")
    for index, each in enumerate(sources if isinstance(sources, list) else ()):
        if not isinstance(each, Mapping) or str(each.get("type") or "file").lower() not in _FILE_TYPES:
            continue
        if isinstance(path := each.get("path"), str):
            yield ("data_config", "sources", index, "path"), path, True


def _mapping(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = document.get(name)
    return found if isinstance(found, Mapping) else {}


def _files(plain: str, path: Path, elsewhere: str) -> tuple[str, list[tuple[Path, str]]]:
    """Where what a path stands for goes, and its files; `elsewhere` is for what does not lie below the job file."""
    parts = [part for part in plain.split("/") if part not in ("", ".")]
    inside = bool(parts) and ".." not in parts and not plain.startswith("~")
    target = "/".join(parts) if inside else f"{elsewhere}/{path.name}"
    if path.is_dir():
        return target, [(file, f"{target}/{file.relative_to(path).as_posix()}") for file in sorted(_below(path))]
    if path.exists() or not _WILD & set(plain):
        return target, [(path, target)] if path.exists() else []
    matching = [Path(found) for found in sorted(glob.glob(str(path), recursive=True)) if Path(found).is_file()]
    if not inside:
        return elsewhere, [(file, f"{elsewhere}/{index}-{file.name}") for index, file in enumerate(matching)]
    base = Path(str(path)[: -len("/".join(parts))])
    return target, [(file, file.relative_to(base).as_posix()) for file in matching]


def _below(directory: Path) -> Iterator[Path]:
    for parent, directories, names in os.walk(directory):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        yield from (Path(parent, name) for name in names if Path(parent, name).is_file() and not name.startswith("."))
