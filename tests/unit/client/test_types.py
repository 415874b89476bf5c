"""The client's types are the server's own, and a newer server's answers pass through an older client."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_type_hints

import httpx

from trainmaster.client import Client, types
from trainmaster.server.core.spec.submit import SubmitJobRequest


def test_types_of_answers_are_those_of_the_schema() -> None:
    classes = [kind for kind in vars(types).values() if inspect.isclass(kind) and kind not in (Any, Mapping)]

    assert len(classes) > 40
    assert {kind.__module__.rpartition(".")[0] for kind in classes} == {"trainmaster.schema"}


def test_unknown_fields_and_values_of_a_newer_server_are_kept() -> None:
    job = {"job_id": "job-1", "status": "HIBERNATING", "dream": {"depth": 3}}

    def answer(request: httpx.Request) -> httpx.Response:
        page = {"jobs": [job], "next_page_token": None, "total_count": 1}
        return httpx.Response(200, json={"status": "ok", "data": page if request.url.path == "/v1/jobs" else job})

    with Client("http://127.0.0.1:1", "key", transport=httpx.MockTransport(answer)) as client:
        assert client.get("job-1") == job
        assert list(client.list()) == [job]


def test_request_of_a_shown_job_has_every_field_of_a_submission_but_its_handle() -> None:
    submitted = set(SubmitJobRequest.model_fields)

    assert set(types.REQUEST_FIELDS) == submitted - {"handle"}
    assert submitted <= set(get_type_hints(types.Job))
