"""docs/fireworks.md: every field of a trainer has its row, and every test that it names is there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from trainmaster import TrainerJobConfig
from trainmaster.api.wire.fireworks.states import DELETED, IDLE, NOT_YET, SAVING, STATES, STOPPING
from trainmaster.core.workloads.trainer_arguments import OPTIONS

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "fireworks.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The cells of the tables below a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]


def named(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def test_every_field_of_a_trainer_has_an_effect_and_a_test() -> None:
    fields = [row for row in rows("Fields of a trainer") if len(row) == 3]
    described = set().union(*(named(row[0]) for row in fields))
    assert {field.name for field in dataclasses.fields(TrainerJobConfig)} <= described
    written = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    for row in fields:
        assert named(row[2]), f"{row[0]} has no test"
        for name in named(row[2]):
            assert f"def {name}(" in written, f"there is no {name}"


def test_every_argument_of_the_trainer_is_described() -> None:
    described = {flag.split()[0] for row in rows("Fields of a trainer") if len(row) == 2 for flag in named(row[0])}
    assert described == {option.flag for option in OPTIONS}


def test_every_state_is_described() -> None:
    described = set().union(*(named(row[0]) for row in rows("States")))
    assert described == {*STATES.values(), *STOPPING.values(), DELETED, IDLE, SAVING, NOT_YET}
