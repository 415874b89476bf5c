"""Every field of a trainer that the Fireworks door makes has an effect, or is refused."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict
from typing import Any

import pytest
from field_tables import Field, broken_reference, fields_of
from pydantic.alias_generators import to_camel

from spec_documents import changed
from trainmaster.server.core.commands import submit
from trainmaster.server.core.errors import RefusedError, SpecError
from trainmaster.server.core.spec.documents import parse
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.core.trainer_request import by_hand
from trainmaster.server.doors.fireworks.job_documents import CreateJobBody, TrainingConfigBody
from trainmaster.server.doors.fireworks.resources import FireworksBody

REFUSED = "refused"
FIELDS = fields_of("trainer_job")
DOCUMENT: dict[str, Any] = {"serviceMode": True, "trainingConfig": {"baseModel": "tiny", "loraRank": 8}}


def outcome(document: dict[str, Any]) -> Any:
    """All that is made of a request, as a bare TrainerJobConfig sends it; `REFUSED` where that is what happens."""
    try:
        body = parse(CreateJobBody, document)
        if not body.service_mode:
            return REFUSED  # by the route
        request = by_hand(body.wanted("trainer"))
    except (SpecError, RefusedError):
        return REFUSED
    job = submit(compile_job(request), account_id="a", job_id="j", created_by="u", now=0.0, default_backend="local").job
    record = {field.name: getattr(job, field.name) for field in dataclasses.fields(job) if field.name != "spec"}
    return record, json.dumps(asdict(compile_job(request).launch))


def members(body: type[FireworksBody]) -> set[str]:
    """What a body may have, but for other bodies."""
    return {to_camel(name) for name in (*body.model_fields, *body.refused)} - {"trainingConfig"}


def test_table_has_a_row_for_every_field_of_a_trainer() -> None:
    wanted = members(CreateJobBody) | {f"trainingConfig.{name}" for name in members(TrainingConfigBody)}
    assert {field.path for field in FIELDS} == wanted


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_field_that_is_changed_changes_what_is_made_of_the_trainer(field: Field) -> None:
    after = outcome(changed(DOCUMENT, field.path, field.value))
    assert outcome(DOCUMENT) is not REFUSED
    assert after != outcome(DOCUMENT)
    assert (after is REFUSED) == (field.effect == REFUSED)


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_field_names_a_test_that_is_there(field: Field) -> None:
    assert broken_reference(field) is None
