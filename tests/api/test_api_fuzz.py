"""Whatever is sent, with whatever key, the API keeps to its own OpenAPI document and never fails by itself."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import schemathesis
from api_roles import BY_SCOPE, ROUTES, Who
from api_world import Served, World
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from patience import PATIENCE_S
from trainmaster.server.app import routers_of
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.settings.settings import Role

EXAMPLES = 6
"""For each operation; more find more, and take longer."""
EXAMPLES_OF_A_SCOPE = 3
"""For each operation, with a key of one scope."""
TAGS = sorted(
    {
        str(tag)
        for router in routers_of({Role.API})
        for route in router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for tag in route.tags
    }
)
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something that is there, so that not everything ends with a 404."""

    schema: Any
    key: str
    keys: dict[str, str]
    """By the one scope that each has."""
    job_id: str
    attempt_id: str
    tokens: dict[str, str]


@pytest.fixture(scope="module")
def target(world: World, served: Served) -> Target:
    key = world.key("fuzz")
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=served.url, headers=headers, timeout=PATIENCE_S, verify=False) as http:
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
        keys={scope: world.key("fuzz", scope) for scope in KeyScope},
        job_id=job_id,
        attempt_id=f"{running_id}.1",
        tokens={"attemptToken": running.token, "rankToken": running.rank_token},
    )


# To make up what controls may be sent takes as long as all others; their own tests send what is wrong, too.
@pytest.mark.parametrize(
    "tag", [pytest.param(tag, marks=pytest.mark.long if tag == "controls" else ()) for tag in TAGS]
)
def test_operation_keeps_to_its_description(target: Target, tag: str) -> None:
    for operation in operations_of(target, tag):
        (wanted, *_) = next(iter(operation.definition.raw.get("security") or [{"bearer": []}]))
        key = target.tokens.get(wanted, target.key)

        def send(case: Any, key: str = key) -> None:
            case.call_and_validate(headers={"X-API-Key": key}, timeout=PATIENCE_S, checks=CHECKS)

        fuzz(operation, target, EXAMPLES, send)


@pytest.mark.long  # test_api_roles.py tries every route with every scope
@pytest.mark.parametrize("scope", KeyScope)
@pytest.mark.parametrize("tag", TAGS)
def test_key_of_one_scope_succeeds_only_where_it_may(target: Target, tag: str, scope: KeyScope) -> None:
    headers = {"X-API-Key": target.keys[scope]}
    for operation in operations_of(target, tag):
        who = WHO[f"{operation.method.upper()} {operation.path}"]
        may = who in (Who.ANYBODY, Who.ANY_KEY) or BY_SCOPE.get(who) == scope

        def send(case: Any, may: bool = may) -> None:
            answer = case.call_and_validate(headers=headers, timeout=PATIENCE_S, checks=CHECKS)
            if may and case.path in ("/v1/keys", "/v1/usage"):
                assert answer.status_code != 401  # a key cannot give scopes that it has not, nor see all accounts
            elif may:
                assert answer.status_code not in (401, 403)
            else:
                # An unknown parameter or a malformed path may be found out first.
                assert answer.status_code in (401, 403, 404, 405, 422), (case.path, answer.status_code)

        fuzz(operation, target, EXAMPLES_OF_A_SCOPE if may else 1, send)


WHO = {operation.replace(":path", ""): who for operation, who in ROUTES.items()}


def operations_of(target: Target, tag: str) -> Iterator[Any]:
    """The operations that have a tag."""
    for found in target.schema.get_all_operations():
        operation = found.ok()
        assert set(operation.tags) <= set(TAGS)
        if tag in operation.tags:
            yield operation


def fuzz(operation: Any, target: Target, examples: int, send: Callable[[Any], None]) -> None:
    @given(case=operation.as_strategy())
    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],  # to make a failure small would take many times as long as to find it
    )
    def one(case: Any) -> None:
        # Half of the requests name something that exists: chosen by their content, so that a failure can be repeated.
        if zlib.crc32(repr(case.path_parameters).encode("utf-8", "replace")) % 2:
            known = {"job_id": target.job_id, "attempt_id": target.attempt_id, "node": 0}
            case.path_parameters.update({name: value for name, value in known.items() if name in case.path_parameters})
        if "wait_s" in (case.query or {}):
            case.query["wait_s"] = 0
        send(case)

    one()


def test_document_names_what_each_route_wants(target: Target, served: Served) -> None:
    document = httpx.get(f"{served.url}/openapi.json", headers={"X-API-Key": target.key}, verify=False).json()
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
