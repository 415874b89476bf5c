"""A small server of the worker routes on top of a run directory, which tests can stop, start and make fail."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from trainmaster.protocol.request import AttemptRequest, Control
from trainmaster.protocol.run_directory import CONTROL, RunDirectory, StreamGapError
from trainmaster.protocol.secrets import NO_SECRETS

LOSE_REQUEST = "lose the request"
LOSE_ANSWER = "lose the answer"

_ROUTE = re.compile(r"/v1/worker/attempts/(?P<attempt>[^/]+)/(?P<what>[a-z]+)(?:/(?P<name>.+))?")


class ReplicaServer:
    """Serves one attempt. `fault` sees every request first and may return LOSE_REQUEST, LOSE_ANSWER or a status."""

    def __init__(self, root: Path, request: AttemptRequest) -> None:
        self.run = RunDirectory(root / request.job_id / str(request.attempt))
        self.run.create(request)
        self.request = request
        self.secrets = NO_SECRETS
        self.blobs: dict[str, bytes] = {}
        self.owner = True
        self.fault: Callable[[str, str], str | int | None] = lambda method, path: None
        self.calls: list[tuple[str, str]] = []
        self.port = 0
        self._changed = threading.Condition()
        self._server: _Server | None = None
        self._thread = threading.Thread()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        self._server = _Server(("127.0.0.1", self.port), _Handler)
        self._server.replica = self
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def stop(self) -> None:
        """Go away: refuse connections and cut those that are open."""
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        self._thread.join()
        server.going = True
        with self._changed:
            self._changed.notify_all()
        server.cut_connections()
        server.server_close()

    def reserve_port(self) -> None:
        """Choose a port, but do not listen yet."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def control(self, control: Control) -> None:
        with self._changed:
            self.run.set_control(control.to_json())
            self._changed.notify_all()

    def exit(self, node: int = 0) -> dict[str, Any] | None:
        return self.run.document(f"nodes/{node}/exit.json")

    def stream(self, name: str) -> bytes:
        return self.run.read(name, 0, 1 << 30)

    def token_for(self, path: str) -> str:
        """What a request must bring."""
        return self.request.rank_token if path.endswith("/owner") else self.request.token

    def answer(self, server: _Server, method: str, target: str, body: bytes) -> tuple[int, object]:
        """The status and the document of an answer; bytes are sent as they are."""
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if url.path.startswith("/v1/blobs/"):
            blob = self.blobs.get(url.path.removeprefix("/v1/blobs/"))
            return (200, blob) if blob is not None else _error(404, "BLOB_NOT_FOUND")
        route = _ROUTE.fullmatch(url.path)
        if route is None or route["attempt"] != self.request.attempt_id:
            return _error(404, "JOB_NOT_FOUND")
        match method, route["what"]:
            case "GET", "request":
                return _ok(self.request.to_json())
            case "GET", "secrets":
                return _ok(self.secrets.to_json())
            case "POST", "claims":
                return _ok({"granted": self.run.claim(int(route["name"]), json.loads(body))})
            case "POST", "streams":
                try:
                    return _ok({"next_offset": self.run.append(route["name"], int(query["offset"]), body)})
                except StreamGapError as gap:
                    return _error(409, "STREAM_GAP", next_offset=gap.next_offset)
            case "PUT", "documents":
                self.run.put_document(route["name"], json.loads(body))
                return _ok({})
            case "GET", "documents":
                document = self.run.document(route["name"])
                return _ok(document) if document is not None else _error(404, "DOCUMENT_NOT_FOUND")
            case "GET", "control":
                return _ok(self._wait_for_control(server, int(query["after"]), float(query["wait_s"])))
            case "GET", "owner":
                return _ok({"owner": self.owner})
        return _error(404, "NOT_FOUND")

    def _wait_for_control(self, server: _Server, after: int, wait_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + wait_s
        with self._changed:
            while not server.going:
                control = self.run.document(CONTROL)
                if control is not None and control["seq"] > after:
                    return control
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
        return None


class _Server(ThreadingHTTPServer):
    replica: ReplicaServer
    going = False

    def __init__(self, *arguments: Any) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__(*arguments)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self._connections.add(connection)
        return connection, address

    def cut_connections(self) -> None:
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def handle_error(self, *_: Any) -> None:
        """A connection that was cut is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # One packet per answer: two would wait for each other's acknowledgement.
    server: _Server

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        replica = self.server.replica
        fault = replica.fault(self.command, self.path)
        if fault == LOSE_REQUEST:
            self.close_connection = True
            return
        if isinstance(fault, int):
            status, document = _error(fault, "FAULT")
        elif self.headers["Authorization"] != f"Bearer {replica.token_for(self.path)}":
            status, document = _error(401, "AUTH_TOKEN_INVALID")
        else:
            status, document = replica.answer(self.server, self.command, self.path, body)
            replica.calls.append((self.command, self.path))
        if fault == LOSE_ANSWER:
            self.close_connection = True
            return
        content = document if isinstance(document, bytes) else json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def log_message(self, *_: Any) -> None:
        pass


def _ok(data: object) -> tuple[int, object]:
    return 200, {"status": "ok", "data": data}


def _error(status: int, code: str, **more: object) -> tuple[int, object]:
    return status, {"status": "error", "error": {"code": code, "message": code, **more}}
