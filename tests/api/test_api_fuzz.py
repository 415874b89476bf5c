"""Whatever is sent, the API keeps to its own OpenAPI document and never fails by itself."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import schemathesis
from api_world import WAIT_S, Served, World
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = 20
"""For each operation; more find more, and take longer."""
TAGS = ["health", "jobs", "controls", "logs", "metrics", "events", "nodes", "blobs", "worker"]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something that is there, so that not everything ends with a 404."""

    schema: Any
    key: str
    job_id: str
    attempt_id: str
    tokens: dict[str, str]


@pytest.fixture(scope="module")
def target(world: World, served: Served) -> Target:
    key = world.key("fuzz")
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=served.url, headers=headers, timeout=WAIT_S) as http:
        document = {"name": "n", "workload": {"kind": "command", "argv": ["true"]}}
        job_id, running_id = (http.post("/v1/jobs", json=document).json()["data"]["job_id"] for _ in range(2))
        job = world.start(job_id)
        world.write(job, "a line\n")
        world.measure(job, step=1, values={"loss": 1.0})
        world.save(job_id, "f1", 1)
        world.end(job_id)  # so that whoever follows it comes to an end
        running = world.start(running_id).live  # so that workers may still report
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json", headers=headers)
    return Target(
        schema=schema,
        key=key,
        job_id=job_id,
        attempt_id=f"{running_id}.1",
        tokens={"attemptToken": running.token, "rankToken": running.rank_token},
    )


@pytest.mark.parametrize("tag", TAGS)
def test_operation_keeps_to_its_description(target: Target, tag: str) -> None:
    operations = [found.ok() for found in target.schema.get_all_operations()]
    for operation in operations:
        assert operation.tags is not None
        assert set(operation.tags) <= set(TAGS)
        if tag in operation.tags:
            fuzz(operation, target)


def fuzz(operation: Any, target: Target) -> None:
    @given(case=operation.as_strategy())
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def send(case: Any) -> None:
        # Half of the requests name something that exists: chosen by their content, so that a failure can be repeated.
        if zlib.crc32(repr(case.path_parameters).encode("utf-8", "replace")) % 2:
            known = {"job_id": target.job_id, "attempt_id": target.attempt_id, "node": 0}
            case.path_parameters.update({name: value for name, value in known.items() if name in case.path_parameters})
        if "wait_s" in (case.query or {}):
            case.query["wait_s"] = 0
        (wanted, *_) = next(iter(operation.definition.raw.get("security") or [{"bearer": []}]))
        key = target.tokens.get(wanted, target.key)
        case.call_and_validate(headers={"Authorization": f"Bearer {key}"}, timeout=WAIT_S, checks=CHECKS)

    send()


def test_document_names_what_each_route_wants(target: Target, served: Served) -> None:
    document = httpx.get(f"{served.url}/openapi.json", headers={"X-API-Key": target.key}).json()
    assert document["security"] == [{"bearer": []}, {"apiKey": []}]
    assert document["paths"]["/healthz"]["get"]["security"] == []
    assert document["paths"]["/v1/worker/attempts/{attempt_id}/owner"]["get"]["security"] == [{"rankToken": []}]
    submit = document["paths"]["/v1/jobs"]["post"]
    assert submit["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/SubmitJobRequest"
    }
    assert {"workload", "resource_config", "handle"} <= set(
        document["components"]["schemas"]["SubmitJobRequest"]["properties"]
    )
    assert any(parameter["name"] == "Idempotency-Key" for parameter in submit["parameters"])
    assert "text/event-stream" in document["paths"]["/v1/jobs/{job_id}/logs"]["get"]["responses"]["200"]["content"]
    assert not [path for path in document["paths"] if "scaimind" in path]
