"""Tables of fields: for every field of a request its effect, a value that brings the effect about, and the test that
shows it.

A table is a YAML file of parts; a part has the fields of one object:

    - part: scheduling_config       # as docs/reference/fields.md shall call it
      path: scheduling_config.      # where the object lies in the request; left out for the request itself
      base: command                 # the request that a field is changed in: a name that the table's test knows
      fields:
        queue: [research, the queue that the job waits in, api/test_api_jobs.py::test_unknown_queue_is_refused]

A field has a value that is not its default, its effect, and a test: its file below tests/ and its name. Where the test
calls the field by another word, a fourth entry is `{word: ...}`; where the field needs others of the part,
`{with: {name: value}}`; where it is changed in another request than the part's, `{base: ...}`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
TESTS = HERE.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A row of a table."""

    part: str
    name: str
    path: str
    """In the request."""
    base: str
    value: Any
    effect: str
    test: str
    word: str
    needs: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.part}: {self.name}"


@cache
def fields_of(table: str) -> tuple[Field, ...]:
    """The rows of a table, by its name: the file without its ending."""
    return tuple(_read(table))


def _read(table: str) -> Iterator[Field]:
    for part in yaml.safe_load((HERE / f"{table}.yaml").read_text()):
        for name, (value, effect, test, *more) in part["fields"].items():
            extra = more[0] if more else {}
            yield Field(
                part=part["part"],
                name=name,
                path=part.get("path", "") + name,
                base=extra.get("base", part.get("base", "")),
                value=value,
                effect=effect,
                test=test,
                word=extra.get("word", name),
                needs={part.get("path", "") + beside: value for beside, value in extra.get("with", {}).items()},
            )


@cache
def _tests_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def broken_reference(field: Field) -> str | None:
    """What is wrong with the test that a row names; None when nothing is."""
    file, _, name = field.test.partition("::")
    if not (TESTS / file).is_file():
        return f"{field}: there is no tests/{file}"
    if name not in _tests_in(file):
        return f"{field}: tests/{file} has no {name}"
    if not re.search(rf"\b{re.escape(field.word)}\b", (TESTS / file).read_text()):
        return f"{field}: tests/{file} does not say {field.word!r}"
    return None
