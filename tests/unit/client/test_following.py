from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from trainmaster.client import ApiError, Client, NotFoundError, UnreachableError, event_stream

END = b"event: end\ndata: {}\n\ndata: [DONE]\n\n"


def line(number: int) -> bytes:
    return f"id: c{number}\nevent: log\ndata: {json.dumps({'message': f'line {number}'})}\n\n".encode()


class Broken(httpx.SyncByteStream):
    """A body that is sent in part before the connection breaks."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks
        raise httpx.ReadError("reset")


class Server:
    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self._answers = list(answers)
        self.cursors: list[str | None] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.cursors.append(request.headers.get("Last-Event-ID"))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "RECONNECT_DELAYS_S", (0.0,))


def messages(server: Server) -> list[str]:
    client = Client("http://server.test", "a-key", transport=httpx.MockTransport(server))
    return [said["message"] for said in client.follow_logs("job-1")]


def test_log_that_is_followed_to_its_end_has_every_line() -> None:
    server = Server(httpx.Response(200, content=b": beat\n\n" + line(1) + line(2) + END))

    assert messages(server) == ["line 1", "line 2"]
    assert server.cursors == [None]


def test_connection_that_breaks_is_taken_up_after_the_last_whole_line() -> None:
    server = Server(
        httpx.Response(200, stream=Broken(line(1), line(2)[:-1])),
        httpx.ConnectError("refused"),
        httpx.Response(503, json={"error": {"code": "UNAVAILABLE", "message": "not yet"}}),
        httpx.Response(200, content=line(2) + line(3) + END),
    )

    assert messages(server) == ["line 1", "line 2", "line 3"]
    assert server.cursors == [None, "c1", "c1", "c1"]


def test_stream_that_ends_without_saying_so_is_taken_up() -> None:
    server = Server(httpx.Response(200, content=line(1)), httpx.Response(200, content=line(2) + END))

    assert messages(server) == ["line 1", "line 2"]
    assert server.cursors == [None, "c1"]


def test_failure_that_passes_is_waited_for() -> None:
    passing = b'event: error\ndata: {"code": "UNAVAILABLE", "message": "locked"}\n\ndata: [DONE]\n\n'
    server = Server(httpx.Response(200, content=line(1) + passing), httpx.Response(200, content=line(2) + END))

    assert messages(server) == ["line 1", "line 2"]


def test_failure_within_the_stream_is_raised() -> None:
    lasting = b'event: error\ndata: {"code": "INTERNAL", "message": "oh no"}\n\ndata: [DONE]\n\n'
    server = Server(httpx.Response(200, content=line(1) + lasting))

    with pytest.raises(ApiError, match="oh no"):
        messages(server)


def test_unknown_job_is_not_waited_for() -> None:
    server = Server(httpx.Response(404, json={"error": {"code": "JOB_NOT_FOUND", "message": "no such job"}}))

    with pytest.raises(NotFoundError):
        messages(server)


def test_server_that_stays_away_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "PATIENCE_S", -1.0)
    server = Server(httpx.Response(200, content=line(1)), httpx.ConnectError("refused"))

    with pytest.raises(UnreachableError):
        messages(server)


def test_events_begin_after_the_one_that_is_named() -> None:
    server = Server(httpx.Response(200, content=b'id: 8\ndata: {"seq": 8}\n\n' + END))
    client = Client("http://server.test", "a-key", transport=httpx.MockTransport(server))

    assert [event["seq"] for event in client.follow_events("job-1", after=7)] == [8]
    assert server.cursors == ["7"]
