"""`docs/guides/fireworks.md` as tests read it: the rows of its tables, and the tests that they name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "guides" / "fireworks.md").read_text()


@dataclass(frozen=True, kw_only=True)
class FieldRow:
    """What the page says of some fields of a trainer."""

    fields: frozenset[str]
    effect: str
    tests: frozenset[str]


def rows(heading: str) -> list[list[str]]:
    """The cells of the tables below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]


def named(cell: str) -> frozenset[str]:
    """What a cell names."""
    return frozenset(re.findall(r"`([^`]+)`", cell))


def field_rows() -> list[FieldRow]:
    """The table of the fields."""
    found = (row for row in rows("Fields of a trainer") if len(row) == 3)
    return [FieldRow(fields=named(fields), effect=effect, tests=named(tests)) for fields, effect, tests in found]


def described_fields() -> set[str]:
    """Every field that has its row."""
    return set().union(*(row.fields for row in field_rows()))


def text_of(test: str) -> str:
    """A test as it is written, with what it is parametrized with and what else of its module it uses.

    Raises:
        ValueError: there is no such test, or there are several.
    """
    found = [path for path, text in _modules().items() if f"\ndef {test}(" in text]
    if len(found) != 1:
        raise ValueError(f"{len(found)} files have a test {test}")
    return "\n".join(_with_what_it_uses(_definitions(found[0]), [test]))


def _with_what_it_uses(definitions: dict[str, str], wanted: Iterable[str]) -> Iterator[str]:
    seen: set[str] = set()
    left = list(wanted)
    while left:
        name = left.pop()
        if name not in seen and name in definitions:
            seen.add(name)
            yield definitions[name]
            left += re.findall(r"\b[A-Za-z_]\w*\b", definitions[name])


@cache
def _modules() -> dict[Path, str]:
    return {path: path.read_text() for path in TESTS.rglob("test_*.py")}


@cache
def _definitions(path: Path) -> dict[str, str]:
    """The functions and constants of a module, as they are written."""
    found = {}
    for node in ast.parse(_modules()[path]).body:
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.Assign(targets=[ast.Name(id=name)])
                | ast.AnnAssign(target=ast.Name(id=name))
            ):
                found[name] = ast.unparse(node)
    return found
