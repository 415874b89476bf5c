"""The JSON schema of a submission, which the OpenAPI document shows."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest

from spec_documents import COMMAND, CUSTOM, changed
from trainmaster.server.core.spec.documents import dump, parse_submit
from trainmaster.server.core.spec.submit import SubmitJobRequest


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return SubmitJobRequest.model_json_schema()


def test_schema_shows_the_workload_as_one_of_the_registered_kinds(schema: dict[str, Any]) -> None:
    union, null = schema["properties"]["workload"]["anyOf"]
    names = {
        "command": "CommandSpec",
        "container": "ContainerSpec",
        "function": "FunctionSpec",
        "job_class": "JobClassSpec",
        "script": "ScriptSpec",
        "service": "ServiceSpec",
        "trainer": "TrainerSpec",
        "trainer_service": "TrainerServiceSpec",
    }
    assert null == {"type": "null"}
    assert union["oneOf"] == [{"$ref": f"#/$defs/{name}"} for name in names.values()]
    assert union["discriminator"] == {
        "propertyName": "kind",
        "mapping": {kind: f"#/$defs/{name}" for kind, name in names.items()},
    }
    assert schema["$defs"]["CommandSpec"]["properties"]["kind"]["const"] == "command"
    assert {"kind", "argv"} <= set(schema["$defs"]["CommandSpec"]["required"])


def test_schema_describes_every_field(schema: dict[str, Any]) -> None:
    models = {"SubmitJobRequest": schema, **schema["$defs"]}
    bare = [
        f"{model}.{name}"
        for model, definition in models.items()
        for name, field in definition.get("properties", {}).items()
        if "description" not in field and "$ref" not in field and name != "kind"
    ]
    assert bare == []


def test_schema_says_that_the_hub_token_is_write_only(schema: dict[str, Any]) -> None:
    token = schema["$defs"]["OutputConfig"]["properties"]["hub_token"]
    assert token["anyOf"][0]["writeOnly"] is True


@pytest.mark.parametrize("document", [COMMAND, CUSTOM])
def test_schema_accepts_what_is_parsed_and_what_is_stored(schema: dict[str, Any], document: dict[str, Any]) -> None:
    jsonschema_rs.validate(schema, document)
    jsonschema_rs.validate(schema, dump(parse_submit(document)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("unknown", 1),
        ("resource_config.gpu_count", "4"),
        ("labels", {"a b": "c"}),
        ("training_config.environment", {"9": "c"}),
        ("handle", "-a"),
        ("workload", {"kind": "none"}),
        ("name", ""),
    ],
)
def test_schema_refuses_what_is_refused(schema: dict[str, Any], path: str, value: Any) -> None:
    assert not jsonschema_rs.is_valid(schema, changed(CUSTOM, path, value))
