"""A table of fields: for each one its effect, a value that brings the effect about, and the test that shows it.

Every table is checked in the same way: it has a row for every field and no other, changing a field to the row's value
changes what is made of the request, and the test is there and is about the field.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Row:
    """One field."""

    name: str
    value: Any
    """Another one than the field's default."""
    effect: str
    """What follows from it, in a sentence."""
    test: str
    """The test that shows the effect: its file below tests/, and its name."""
    word: str = ""
    """What that test's file calls the field, where that is another name."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Other fields that the field needs, by their paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a request: the fields of one object."""

    title: str
    path: str
    """Where the object lies in the document, with a dot at the end; empty for the request itself."""
    base: Any
    """A request in which the part is there."""
    rows: Sequence[Row]


@cache
def test_names(file: str) -> frozenset[str]:
    """The tests in a file."""
    tree = ast.parse((TESTS / file).read_text())
    return frozenset(
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def broken_reference(row: Row) -> str | None:
    """What is wrong with the test that a row names; None when nothing is."""
    file, _, name = row.test.partition("::")
    if not (TESTS / file).is_file():
        return f"{row.name}: there is no tests/{file}"
    if name not in test_names(file):
        return f"{row.name}: tests/{file} has no {name}"
    word = row.word or row.name
    if not re.search(rf"\b{re.escape(word)}\b", (TESTS / file).read_text()):
        return f"{row.name}: tests/{file} does not say {word!r}"
    return None
