"""The training shapes that an operator wrote: one YAML file each, read when the server starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainmaster.plain_yaml import YamlError, parse_yaml
from trainmaster.server.core.errors import SpecError
from trainmaster.server.core.shapes import Shape, Shapes
from trainmaster.server.core.spec import parse

SUFFIXES = (".yaml", ".yml")


class ShapeFileError(ValueError):
    """A file is no training shape; the message says why."""


def load_shapes(directory: Path) -> Shapes:
    """The shapes of a directory beside the built-in ones; one that is not there has none.

    Raises:
        ShapeFileError: files are no shapes; what is wrong, line by line.
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
    """The document of a file; a shape that has no name of its own has the file's."""
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"), path.name)
    except YamlError as error:
        raise ValueError(str(error)) from error
    return {"name": path.stem, **document} if isinstance(document, dict) else document
