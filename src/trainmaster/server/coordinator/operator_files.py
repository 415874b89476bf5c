"""YAML files of the operator: training runtimes, read on request, and training shapes, read when the server starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.plain_yaml import YamlError, parse_yaml, parse_yaml_documents
from trainmaster.server.core.errors import NotFoundError, SpecError
from trainmaster.server.core.shapes import Shape, Shapes
from trainmaster.server.core.spec.parse import parse

# Training runtimes: YAML files in the format of Kubeflow's.
#
# Clients interpret them; the server only returns them. So it reads them on request: a new file counts at once, and a
# broken one is reported to whoever asks instead of keeping the server down.

SUFFIXES = (".yaml", ".yml")
KINDS = ("ClusterTrainingRuntime", "TrainingRuntime")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeDocument:
    name: str
    kind: str
    file: str
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenFile:
    file: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeFiles:
    runtimes: tuple[RuntimeDocument, ...] = ()
    broken: tuple[BrokenFile, ...] = ()

    def get(self, name: str) -> RuntimeDocument:
        for runtime in self.runtimes:
            if runtime.name == name:
                return runtime
        broken = "".join(f"; {each.file} cannot be used: {each.message}" for each in self.broken)
        raise NotFoundError(f"there is no runtime {name} on this server{broken}")


def load_runtimes(directory: Path) -> RuntimeFiles:
    """The runtimes of a directory, in the order of the files; a missing directory has none."""
    found: dict[str, RuntimeDocument] = {}
    broken: list[BrokenFile] = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.suffix not in SUFFIXES:
            continue
        for number, document in enumerate(_documents(path, broken), start=1):
            try:
                runtime = _runtime(document, path.name)
                if runtime is not None and runtime.name in found:
                    raise ValueError(f"metadata.name: {found[runtime.name].file} has a {runtime.name} already")
                if runtime is not None:
                    found[runtime.name] = runtime
            except ValueError as error:
                broken.append(BrokenFile(file=path.name, message=f"document {number}: {error}"))
    return RuntimeFiles(runtimes=tuple(found.values()), broken=tuple(broken))


def _documents(path: Path, broken: list[BrokenFile]) -> list[Any]:
    try:
        return [each for each in parse_yaml_documents(path.read_text(encoding="utf-8"), path.name) if each is not None]
    except (OSError, ValueError) as error:  # YamlError is a ValueError
        broken.append(BrokenFile(file=path.name, message=str(error)))
        return []


def _runtime(document: Any, file: str) -> RuntimeDocument | None:
    """Check what is needed to return a document; clients check the rest. None: it is something else."""
    kind = document.get("kind") if isinstance(document, dict) else None
    if not isinstance(kind, str):
        raise ValueError(f"kind: must be {' or '.join(KINDS)}")
    if kind not in KINDS:
        return None
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("metadata.name: is required")
    try:
        plain = json.loads(json.dumps(document, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON: {error}") from error
    return RuntimeDocument(name=name, kind=kind, file=file, document=plain)


# Training shapes: one YAML file each.


class ShapeFileError(ValueError): ...


def load_shapes(directory: Path) -> Shapes:
    """The built-in shapes and those of a directory, which may be missing.

    Raises:
        ShapeFileError: with the problems of all files, line by line.
    """
    files = sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES) if directory.is_dir() else []
    found: dict[str, Shape] = {}
    problems: list[str] = []
    for path in files:
        try:
            shape = parse(Shape, _document(path))
            if shape.name in found:
                problems.append(f"{path}: name: another file has a shape {shape.name} already")
            found[shape.name] = shape
        except SpecError as error:
            problems += [f"{path}: {problem.field}: {problem.message}" for problem in error.problems]
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {error}")
    if problems:
        raise ShapeFileError("\n".join(problems))
    return Shapes(tuple(found.values()))


def _document(path: Path) -> Any:
    """The document of a file; a shape without a name gets the file's."""
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"), path.name)
    except YamlError as error:
        raise ValueError(str(error)) from error
    return {"name": path.stem, **document} if isinstance(document, dict) else document
