"""docs/guides/fireworks.md has a row for every field of a trainer, and the tests that it names are about that field."""

from __future__ import annotations

import dataclasses
import re

import pytest

from fireworks_page import PAGE, FieldRow, described_fields, field_rows, named, rows, text_of
from trainmaster import TrainerJobConfig
from trainmaster.server.core.workloads.trainer_service import OPTIONS
from trainmaster.server.doors.fireworks.job_documents import DELETED, IDLE, NOT_YET, SAVING, STATES, STOPPING

REFERENCE = {
    "base_model",
    "lora_rank",
    "max_context_length",
    "learning_rate",
    "gradient_accumulation_steps",
    "node_count",
    "hot_load_deployment_id",
    "display_name",
    "region",
    "custom_image_tag",
    "extra_args",
    "accelerator_type",
    "accelerator_count",
    "skip_validations",
    "forward_only",
}
"""What the public reference of the service lists; the classes of the clients have more."""
WITHOUT_EFFECT = {
    "skip_validations": "Without a shape it has no effect",
    "hot_load_deployment_id": "refused",
    "projection_head_dim": "refused",
}
"""Fields that do less than their name says, and how the page has to say so."""


def test_every_field_has_a_row_of_its_own() -> None:
    own = {field.name for field in dataclasses.fields(TrainerJobConfig)}
    assert REFERENCE | own <= described_fields()
    assert len(described_fields()) == sum(len(row.fields) for row in field_rows())
    missing = PAGE.partition("has all of these except ")[2].partition(".\n")[0]
    assert named(missing) == described_fields() - own


@pytest.mark.parametrize("row", field_rows(), ids=lambda row: "-".join(sorted(row.fields)))
def test_every_field_is_the_subject_of_a_test_that_its_row_names(row: FieldRow) -> None:
    written = [text_of(test) for test in row.tests]
    for field in row.fields:
        first, *rest = field.split("_")
        on_the_wire = first + "".join(part.capitalize() for part in rest)
        word = re.compile(rf"(?<![A-Za-z]){field}(?![a-z_])|(?<![A-Za-z]){on_the_wire}(?![A-Za-z])")
        assert any(word.search(text) for text in written), f"no test of {sorted(row.tests)} is about {field}"


def test_every_field_without_an_effect_is_called_so() -> None:
    effects = {field: row.effect for row in field_rows() for field in row.fields}
    assert {field for field, effect in effects.items() if "no effect" in effect or effect.startswith("refused")} == set(
        WITHOUT_EFFECT
    )
    for field, words in WITHOUT_EFFECT.items():
        assert words in effects[field]


def test_every_argument_of_the_trainer_is_described() -> None:
    described = {flag.split()[0] for row in rows("Fields of a trainer") if len(row) == 2 for flag in named(row[0])}
    assert described == set(OPTIONS)


def test_every_state_is_described() -> None:
    described = set().union(*(named(row[0]) for row in rows("States")))
    assert described == {*STATES.values(), *STOPPING.values(), DELETED, IDLE, SAVING, NOT_YET}
