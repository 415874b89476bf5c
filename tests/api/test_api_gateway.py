"""The gateway: requests reach the service that a job is."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from api_world import SERVICE, Api, World, wait_for

from attacker import UID, squatting
from patience import PATIENCE_S
from trainmaster.server.store import accounts, jobs
from trainmaster.server.store.scope import Scope


@pytest.fixture(scope="module", autouse=True)
def _quick_records() -> Iterator[None]:
    """Use is written ten times a second: tests wait for several rounds of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainmaster.server.http.gateway.WRITE_USE_EVERY_S", 0.1)
        yield


class Handler(BaseHTTPRequestHandler):
    """A service that tells what it was sent."""

    protocol_version = "HTTP/1.1"
    gate = threading.Event()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        pass

    def answer(self) -> None:
        if self.path == "/stream":
            return self.stream()
        if self.path == "/slow":
            self.gate.wait(PATIENCE_S)
        if self.path == "/die":
            return self.die()
        size = self.headers.get("Content-Length")
        sent = self.rfile.read(int(size)) if size else self.chunked() if "Transfer-Encoding" in self.headers else b""
        seen = {
            "method": self.command,
            "path": self.path,
            "headers": {name.lower(): value for name, value in self.headers.items()},
            "body": sent.decode(),
        }
        body = json.dumps(seen).encode()
        self.send_response(418 if "teapot" in self.path else 200)
        self.send_header("Set-Cookie", "a=1")
        self.send_header("Set-Cookie", "b=2")
        self.send_header("Connection", "X-Private")
        self.send_header("X-Private", "for this connection")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        return None

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = answer  # noqa: N815

    def chunked(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"5\r\nfirst\r\n")
        self.wfile.flush()
        self.gate.wait(PATIENCE_S)
        self.wfile.write(b"6\r\nsecond\r\n0\r\n\r\n")

    def die(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"half")
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def job_id(api: Api, world: World, service: str) -> str:
    job_id = api.submit(**SERVICE)
    world.start(job_id)
    world.see(job_id, endpoint=service)
    return job_id


def echo(api: Api, method: str, path: str, **options: Any) -> Any:
    response = api.http.request(method, path, **options)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_request_reaches_the_service_as_it_was_sent(api: Api, job_id: str, method: str) -> None:
    seen = echo(api, method, f"/v1/jobs/{job_id}/proxy/a%2Fb//c?x=1&y=%20", content=b"hello", headers={"X-Mine": "1"})
    assert (seen["method"], seen["path"], seen["body"]) == (method, "/a%2Fb//c?x=1&y=%20", "hello")
    assert seen["headers"]["x-mine"] == "1"
    assert seen["headers"]["x-forwarded-prefix"].endswith(f"{job_id}/proxy")


def test_root_of_the_service_is_reached_with_and_without_a_slash(api: Api, job_id: str) -> None:
    for address in (
        f"/v1/jobs/{job_id}/proxy",
        f"/v1/jobs/{job_id}/proxy/",
        f"/v1/modules/scaimind/jobs/{job_id}/proxy/",
    ):
        assert echo(api, "GET", address)["path"] == "/"


def test_our_credentials_stay_with_us(api: Api, job_id: str) -> None:
    seen = echo(api, "GET", f"/v1/jobs/{job_id}/proxy/")
    assert api.key not in json.dumps(seen)
    headers = {"X-API-Key": api.key, "Authorization": "Bearer for-the-service"}
    seen = echo(api, "GET", f"/v1/jobs/{job_id}/proxy/", headers=headers)
    assert api.key not in json.dumps(seen)
    assert seen["headers"]["authorization"] == "Bearer for-the-service"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_on_the_port_of_a_service_is_sent_nothing(api: Api, world: World) -> None:
    job_id = api.submit(**SERVICE)
    world.start(job_id)
    with squatting() as squatter:
        world.see(job_id, endpoint=f"127.0.0.1:{squatter.port}")
        answer = api.http.post(f"/v1/jobs/{job_id}/proxy/", content=b"a secret of the user")
        assert (answer.status_code, f"taken by uid {UID}" in answer.text) == (502, True)
    assert squatter.received == b""
    # The same user is welcome where the account's jobs run as that user.
    everything = Scope.everything()
    world.database.write_now(lambda connection: accounts.set_uid(connection, everything, api.account_id, UID))
    try:
        with squatting() as service:
            world.see(job_id, endpoint=f"127.0.0.1:{service.port}")
            assert api.http.post(f"/v1/jobs/{job_id}/proxy/", content=b"a secret of the user").text == "ok"
        assert b"a secret of the user" in service.received
    finally:
        world.database.write_now(lambda connection: accounts.set_uid(connection, everything, api.account_id, None))


def test_answer_comes_back_as_it_was_given(api: Api, job_id: str) -> None:
    response = api.http.get(f"/v1/jobs/{job_id}/proxy/teapot")
    assert response.status_code == 418
    assert response.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert "x-private" not in response.headers
    assert response.headers["X-Request-Id"]


def test_request_without_a_body_stays_without_one(api: Api, job_id: str) -> None:
    seen = echo(api, "GET", f"/v1/jobs/{job_id}/proxy/")
    assert not {"transfer-encoding", "content-length"} & set(seen["headers"])


def test_head_has_headers_and_no_body(api: Api, job_id: str) -> None:
    response = api.http.head(f"/v1/jobs/{job_id}/proxy/")
    assert (response.status_code, response.content) == (200, b"")
    assert int(response.headers["content-length"]) > 0


def test_body_of_unknown_length_is_passed_on(api: Api, job_id: str) -> None:
    seen = echo(api, "POST", f"/v1/jobs/{job_id}/proxy/", content=iter([b"one", b"two"]))
    assert seen["body"] == "onetwo"


def test_answer_is_passed_on_as_it_comes(api: Api, job_id: str) -> None:
    Handler.gate.clear()
    with api.http.stream("GET", f"/v1/jobs/{job_id}/proxy/stream") as response:
        pieces = response.iter_raw()
        assert next(pieces) == b"first"
        Handler.gate.set()
        assert b"".join(pieces) == b"second"


def test_answer_that_breaks_off_does_not_look_whole(api: Api, job_id: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        api.http.get(f"/v1/jobs/{job_id}/proxy/die")


def last_use(world: World, job_id: str) -> float:
    with world.database.read() as connection:
        return jobs.last_use(connection, Scope.everything(), job_id) or 0.0


def goes_on_being_used(world: World, job_id: str) -> bool:
    """Whether use is recorded again and again, for longer than one round of writing takes."""
    latest = last_use(world, job_id)
    for _ in range(3):
        latest = wait_for(lambda before=latest: (now := last_use(world, job_id)) > before and now)
    return True


def test_use_is_recorded(api: Api, world: World, job_id: str) -> None:
    echo(api, "GET", f"/v1/jobs/{job_id}/proxy/")
    first = wait_for(lambda: last_use(world, job_id))
    echo(api, "GET", f"/v1/jobs/{job_id}/proxy/")
    wait_for(lambda: last_use(world, job_id) > first)


@pytest.mark.parametrize("path", ["slow", "stream"])
def test_service_that_takes_its_time_is_in_use_until_it_has_answered(
    api: Api, world: World, job_id: str, path: str
) -> None:
    Handler.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(api.http.get, f"/v1/jobs/{job_id}/proxy/{path}")
        try:
            assert goes_on_being_used(world, job_id)
            assert not answer.done()
        finally:
            Handler.gate.set()
        assert answer.result(PATIENCE_S).status_code == 200


def test_service_is_in_use_while_a_request_is_being_sent(api: Api, world: World, job_id: str) -> None:
    def body() -> Iterator[bytes]:
        yield b"one"
        assert goes_on_being_used(world, job_id)
        yield b"two"

    assert echo(api, "POST", f"/v1/jobs/{job_id}/proxy/", content=body())["body"] == "onetwo"


def test_job_that_is_no_service_is_refused(api: Api) -> None:
    assert "no service" in api.call("GET", f"/v1/jobs/{api.submit()}/proxy/", 409)["message"]


def test_service_that_is_not_ready_says_when_to_try_again(api: Api, world: World) -> None:
    job_id = api.submit(**SERVICE)
    response = api.http.get(f"/v1/jobs/{job_id}/proxy/")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "SERVICE_NOT_READY"
    assert int(response.headers["Retry-After"]) == response.json()["error"]["retry_after"] > 0


def test_service_that_ended_says_so_and_works_again_after_a_resume(
    api: Api, world: World, job_id: str, service: str
) -> None:
    world.end(job_id, "KILLED_BY_SIGNAL")
    error = api.call("GET", f"/v1/jobs/{job_id}/proxy/", 503)
    assert "resume" in error["message"]
    assert "retry_after" not in error
    api.call("POST", f"/v1/jobs/{job_id}/resume")
    assert api.call("GET", f"/v1/jobs/{job_id}/proxy/", 503)["retry_after"]
    world.start(job_id)
    world.see(job_id, endpoint=service)
    assert echo(api, "GET", f"/v1/jobs/{job_id}/proxy/again")["path"] == "/again"


def test_service_that_died_without_a_word_is_a_bad_gateway(api: Api, world: World) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    job_id = api.submit(**SERVICE)
    world.start(job_id)
    world.see(job_id, endpoint=f"127.0.0.1:{port}")
    assert api.call("GET", f"/v1/jobs/{job_id}/proxy/", 502)["code"] == "SERVICE_UNREACHABLE"


def test_client_that_leaves_ends_the_request_to_the_service(api: Api, world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        job_id = api.submit(**SERVICE)
        world.start(job_id)
        world.see(job_id, endpoint=f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(httpx.ReadTimeout):
            api.http.get(f"/v1/jobs/{job_id}/proxy/slow", timeout=0.5)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(60)
            received = b""
            while piece := connection.recv(65536):
                received += piece
    assert received.startswith(b"GET /slow HTTP/1.1\r\n")


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A service that answers every request with these bytes, and closes."""

    class Raw(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.recv(65536)
                self.request.sendall(answer)
                self.request.shutdown(socket.SHUT_WR)
                self.request.recv(1)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Raw) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 600 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n",
        b"hello\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * (1 << 20) + b"\r\n\r\n",
    ],
)
def test_answer_that_is_no_http_is_a_bad_gateway(api: Api, world: World, answer: bytes) -> None:
    job_id = api.submit(**SERVICE)
    world.start(job_id)
    with answering(answer) as address:
        world.see(job_id, endpoint=address)
        assert api.call("GET", f"/v1/jobs/{job_id}/proxy/", 502)["code"] == "SERVICE_UNREACHABLE"


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (b"204 No Content\r\nContent-Length: 5\r\n\r\n", 204, b""),
        (b"304 Not Modified\r\nContent-Length: 5\r\n\r\n", 304, b""),
    ],
)
def test_length_that_is_not_the_bodys_is_left_out(
    api: Api, world: World, answer: bytes, status: int, body: bytes
) -> None:
    job_id = api.submit(**SERVICE)
    world.start(job_id)
    with answering(b"HTTP/1.1 " + answer) as address:
        world.see(job_id, endpoint=address)
        response = api.http.get(f"/v1/jobs/{job_id}/proxy/")
        assert (response.status_code, response.content) == (status, body)
        # The connection is good for another request.
        assert api.show(job_id)["job_id"] == job_id
