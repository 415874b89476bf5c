"""Every field of a submission has an effect, or is refused."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from field_tables import Field, broken_reference, fields_of

from spec_documents import COMMAND, CUSTOM, LORA, changed
from trainmaster.server.core.commands import submit
from trainmaster.server.core.errors import RefusedError, SpecError
from trainmaster.server.core.retention import checkpoint_limit
from trainmaster.server.core.spec.documents import parse_submit, secret_values
from trainmaster.server.core.spec.submit import SubmitJobRequest, compile_job
from trainmaster.server.doors.fireworks.job_documents import job_document

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from job_fields import holds_objects, parts

REFUSED = "refused"
OF_ONE_KIND = ("workload", "training_config", "data_config")
"""Fields of one kind of job alone; the configs of a training are refused as a whole beside another workload."""
FIELDS = fields_of("job")


def job_of(kind: str, **workload: Any) -> dict[str, Any]:
    return {"name": "n", "workload": {"kind": kind, **workload}}


def initialized(which: str, **initializer: Any) -> dict[str, Any]:
    return changed(COMMAND, f"workload.initializers.{which}", initializer)


DIGEST = "0" * 64
KINDS: dict[str, dict[str, Any]] = {
    "command": COMMAND,
    "script": job_of("script", path="a.py", files=[{"path": "a.py", "sha256": DIGEST}]),
    "function": job_of("function", name="f", source="def f(): pass\n"),
    "container": job_of("container", image="i"),
    "service": job_of("service", argv=["serve"]),
    "trainer_service": job_of("trainer_service", base_model="tiny", model_path="/srv/models/tiny"),
    "job_class": job_of("job_class", target="module:Class"),
    "trainer": LORA,
    "CUSTOM": CUSTOM,
}
"""A plain job of every kind, and of a training by a script of the user's own."""

HUB = {"type": "huggingface", "storage_uri": "hf://org/data"}
S3 = {"type": "s3", "storage_uri": "s3://bucket/data"}
CACHE = {
    "type": "cache",
    "storage_uri": "cache://schema/table",
    "metadata_loc": "s3://bucket/metadata.json",
    "num_data_nodes": 2,
}
DOCUMENTS: dict[str, dict[str, Any]] = {
    **KINDS,
    "volumes": changed(COMMAND, "workload.volumes", [{"source": "/srv/a", "target": "/a"}]),
    "container options": changed(COMMAND, "workload.container", {}),
    "kubernetes options": changed(COMMAND, "workload.kubernetes", {}),
    "files": changed(COMMAND, "workload.files", [{"path": "a", "sha256": DIGEST}]),
    "hub dataset": initialized("dataset", **HUB),
    "hub model": initialized("model", **HUB),
    "s3 dataset": initialized("dataset", **S3),
    "s3 model": initialized("model", **S3),
    "cached dataset": initialized("dataset", **CACHE),
    "mixed": changed(LORA, "data_config.sources", [{"path": "hf://org/data"}, {"path": "hf://org/more"}]),
    "filtered": changed(LORA, "data_config.sources[0].filters", [{"column": "a", "op": "eq", "value": 1}]),
}


def outcome(document: dict[str, Any]) -> Any:
    """All that is made of a submission, without the copy of it that is kept; `REFUSED` where that is what happens."""
    try:
        request = parse_submit(document)
    except (SpecError, RefusedError):
        return REFUSED
    job = submit(compile_job(request), account_id="a", job_id="j", created_by="u", now=0.0, default_backend="local").job
    record = {field.name: getattr(job, field.name) for field in dataclasses.fields(job) if field.name != "spec"}
    read_later = (job.resumes_from_best, job.waits_for_nodes, checkpoint_limit(job))
    shown = job_document(job) if job.workload_kind == "trainer_service" else {}
    return record, read_later, shown, json.dumps(asdict(compile_job(request).launch)), secret_values(request)


def document_for(field: Field) -> dict[str, Any]:
    document = DOCUMENTS[field.base]
    for path, value in field.needs.items():
        document = changed(document, path, value)
    return document


def test_table_has_a_row_for_every_field_of_a_submission() -> None:
    schema = SubmitJobRequest.model_json_schema()
    wanted = {
        f"{title.replace('`', '')}: {name}"
        for title, part in parts(schema)
        for name, field in part["properties"].items()
        if "const" not in field and not holds_objects(field, part)
    }
    assert {str(field) for field in FIELDS} == wanted


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_field_that_is_changed_changes_what_is_made_of_the_job(field: Field) -> None:
    before = document_for(field)
    assert outcome(before) is not REFUSED
    after = outcome(changed(before, field.path, field.value))
    assert after != outcome(before)
    assert (after is REFUSED) == (field.effect == REFUSED)


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_field_names_a_test_that_is_there(field: Field) -> None:
    assert broken_reference(field) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", [field for field in FIELDS if not field.path.startswith(OF_ONE_KIND)], ids=str)
def test_field_has_an_effect_on_every_kind_of_job_or_is_refused(field: Field, kind: str) -> None:
    """What the trainers read must not be accepted, and ignored, beside a command."""
    document = KINDS[kind]
    for path, value in field.needs.items():
        document = changed(document, path, value)
    before = outcome(document)
    assert before is REFUSED or outcome(changed(document, field.path, field.value)) != before
