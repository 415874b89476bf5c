from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from trainmaster.client import (
    ApiError,
    Client,
    ClientError,
    ConflictError,
    FieldProblem,
    InvalidError,
    NotFoundError,
    RateLimitedError,
    UnavailableError,
    UnreachableError,
    connection,
)

URL = "http://server.test"


def ok(data: object, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json={"status": "ok", "data": data})


def refusal(status: int, code: str, **error: object) -> httpx.Response:
    body = {"status": "error", "error": {"code": code, "message": "no", **error}, "meta": {"request_id": "req-1"}}
    return httpx.Response(status, json=body)


class Server:
    """Answers from a list; an exception in it is a broken connection."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self._answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.requests.append(request)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RETRY_DELAYS_S", (0.0, 0.0))
    monkeypatch.setattr(connection, "LONGEST_RETRY_AFTER_S", 0.0)


def client_of(server: Callable[[httpx.Request], httpx.Response]) -> Client:
    return Client(URL, "a-key", transport=httpx.MockTransport(server))


def test_submit_over_a_broken_connection_is_sent_again_under_one_key() -> None:
    server = Server(httpx.ReadError("reset"), refusal(503, "UNAVAILABLE", retry_after=1), ok({"job_id": "job-1"}, 201))

    assert client_of(server).submit({"name": "n"})["job_id"] == "job-1"

    keys = {request.headers["Idempotency-Key"] for request in server.requests}
    assert len(server.requests) == 3
    assert len(keys) == 1
    assert all(request.headers["Authorization"] == "Bearer a-key" for request in server.requests)


def test_two_submissions_have_two_keys() -> None:
    server = Server(ok({"job_id": "job-1"}, 201), ok({"job_id": "job-2"}, 201))
    client = client_of(server)

    client.submit({"name": "n"})
    client.submit({"name": "n"})

    first, second = (request.headers["Idempotency-Key"] for request in server.requests)
    assert first != second


def test_delete_over_a_broken_connection_is_sent_again_under_one_key() -> None:
    server = Server(httpx.ReadError("reset"), ok({"job_id": "job-1"}))

    assert client_of(server).delete("job-1", purge=True)["job_id"] == "job-1"

    first, second = server.requests
    assert first.headers["Idempotency-Key"] == second.headers["Idempotency-Key"]
    assert second.url.params["purge"] == "true"


def test_server_that_stays_away_is_unreachable() -> None:
    server = Server(*[httpx.ConnectError("refused")] * 3)

    with pytest.raises(UnreachableError, match=r"server\.test"):
        client_of(server).get("job-1")


def test_server_that_stays_unavailable_says_so() -> None:
    server = Server(*[refusal(503, "UNAVAILABLE")] * 3)

    with pytest.raises(UnavailableError):
        client_of(server).get("job-1")


def test_server_that_is_too_slow_is_not_asked_again() -> None:
    server = Server(httpx.ReadTimeout("slow"))

    with pytest.raises(UnreachableError, match="in time"):
        client_of(server).get("job-1")


@pytest.mark.parametrize(
    ("status", "kind"), [(404, NotFoundError), (409, ConflictError), (422, InvalidError), (418, ApiError)]
)
def test_refusal_becomes_the_error_of_its_status(status: int, kind: type[ApiError]) -> None:
    details = [{"field": "name", "message": "is empty"}]
    server = Server(refusal(status, "SOME_CODE", details=details))

    with pytest.raises(kind) as caught:
        client_of(server).get("job-1")

    error = caught.value
    assert (error.status, error.code, error.message, error.request_id) == (status, "SOME_CODE", "no", "req-1")
    assert error.problems == (FieldProblem(field="name", message="is empty"),)


def test_refused_transition_tells_what_would_allow_it() -> None:
    server = Server(refusal(409, "INVALID_STATE_TRANSITION", details={"status": "QUEUED", "allowed_from": ["PAUSED"]}))

    with pytest.raises(ConflictError) as caught:
        client_of(server).resume("job-1")

    assert caught.value.details == {"status": "QUEUED", "allowed_from": ["PAUSED"]}
    assert caught.value.problems == ()


def test_answer_of_something_else_is_told_apart() -> None:
    server = Server(httpx.Response(200, text="<html>a router's login page</html>"))

    with pytest.raises(UnreachableError, match="not a Trainmaster server"):
        client_of(server).get("job-1")


def test_error_without_an_envelope_keeps_its_status() -> None:
    server = Server(httpx.Response(500, text="<html>", headers={"X-Request-Id": "req-9"}))

    with pytest.raises(ApiError) as caught:
        client_of(server).get("job-1")
    assert (caught.value.status, caught.value.request_id) == (500, "req-9")


def test_address_that_is_none_is_unreachable() -> None:
    with pytest.raises(UnreachableError):
        Client("nonsense", "a-key").get("job-1")


def test_list_goes_through_all_pages_with_its_filters() -> None:
    server = Server(
        ok({"jobs": [{"job_id": "a"}, {"job_id": "b"}], "next_page_token": "t", "total_count": 3}),
        ok({"jobs": [{"job_id": "c"}], "next_page_token": None, "total_count": 3}),
    )

    jobs = client_of(server).list(statuses=["QUEUED", "PAUSED"], labels={"a.b": "c"}, queue="q")

    assert [job["job_id"] for job in jobs] == ["a", "b", "c"]
    first, second = (request.url.params for request in server.requests)
    assert first.get_list("status") == ["QUEUED", "PAUSED"]
    assert first["labels.a.b"] == "c"
    assert "page_token" not in first
    assert second["page_token"] == "t"
    assert second["queue"] == "q"


def test_job_name_is_quoted_in_the_address() -> None:
    server = Server(ok({}))

    client_of(server).get("../nodes?x=1")

    assert server.requests[0].url.raw_path == b"/v1/jobs/..%2Fnodes%3Fx%3D1"


def test_cancel_of_a_job_that_ended_can_be_fine() -> None:
    server = Server(refusal(409, "INVALID_STATE_TRANSITION"), ok({"job_id": "job-1", "status": "COMPLETED"}))

    assert client_of(server).cancel("job-1", missing_ok=True)["status"] == "COMPLETED"


def test_retry_with_new_resources_says_that_it_changes_them() -> None:
    server = Server(ok({"job_id": "job-2"}, 201))

    client_of(server).retry("job-1", new_resource_config={"gpu_count": 0})

    body = json.loads(server.requests[0].content)
    assert body == {"checkpoint_id": "", "modify_resources": True, "new_resource_config": {"gpu_count": 0}}


def test_tokens_are_passed_on_with_what_starts_a_job_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINMASTER_SCAIATLAS_TOKEN", "atlas")
    server = Server(*(ok({"job_id": "job-1"}) for _ in range(4)))
    client = Client("http://server.test", "a-key", scaidrive_token="drive", transport=httpx.MockTransport(server))

    client.submit({"name": "n"})
    client.resume("job-1")
    client.retry("job-1")
    client.get("job-1")

    *starting, other = [
        (request.headers.get("X-ScaiDrive-Token"), request.headers.get("X-ScaiAtlas-Token"))
        for request in server.requests
    ]
    assert starting == [("drive", "atlas")] * 3
    assert other == (None, None)


def test_request_that_came_too_soon_is_sent_again_when_the_server_says() -> None:
    server = Server(refusal(429, "RATE_LIMITED", retry_after=1), ok({"job_id": "job-1"}))

    assert client_of(server).get("job-1")["job_id"] == "job-1"


def test_server_that_stays_overrun_says_so() -> None:
    server = Server(*[refusal(429, "RATE_LIMITED", retry_after=1)] * 3)

    with pytest.raises(RateLimitedError) as caught:
        client_of(server).get("job-1")
    assert caught.value.retry_after_s == 1


def test_change_without_a_key_of_its_own_is_not_sent_twice() -> None:
    server = Server(httpx.ReadError("reset"), ok({}, 201))

    with pytest.raises(UnreachableError):
        client_of(server).admin.create_key("ci", scopes=["view"])
    assert len(server.requests) == 1


def test_change_that_never_arrived_is_sent_again() -> None:
    server = Server(httpx.ConnectError("refused"), refusal(429, "RATE_LIMITED", retry_after=1), ok({"key": "k"}, 201))

    assert client_of(server).admin.create_key("ci", scopes=["view"])["key"] == "k"


def test_certificates_that_are_not_there_are_named() -> None:
    with pytest.raises(ClientError, match=r"/nowhere/ca\.pem"):
        Client("https://server.test", "a-key", ca="/nowhere/ca.pem")
