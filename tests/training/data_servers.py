"""Servers that data and models are fetched from in tests: plain files, and enough of the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from patience import PATIENCE_S

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(kw_only=True)
class FileServer:
    """Files by their paths, and how they are answered."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    redirects: dict[str, str] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)
    """Answered first, one for each request, before anything else."""
    cut_after: list[int] = field(default_factory=list)
    """So many bytes are sent, one number for each request, before the connection breaks."""
    token: str | None = None
    """Wanted as a bearer token."""
    validators: bool = True
    """Whether answers have an ETag."""
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """Path with query, and headers in lower case, of each request."""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        self.requests.append((handler.path, headers))
        path = unquote(urlsplit(handler.path).path)
        if self.statuses:
            return _send(handler, self.statuses.pop(0))
        if self.token is not None and headers.get("authorization") != f"Bearer {self.token}":
            return _send(handler, 401)
        if path in self.redirects:
            return _send(handler, 302, {"Location": self.redirects[path]})
        if path not in self.files:
            return _send(handler, 404)
        return self._send_file(handler, headers, self.files[path])

    def _send_file(self, handler: BaseHTTPRequestHandler, headers: dict[str, str], content: bytes) -> None:
        etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        answer = {"ETag": etag} if self.validators else {}
        if self.validators and headers.get("if-none-match") == etag:
            return _send(handler, 304, answer)
        status, body = 200, content
        found = re.fullmatch(r"bytes=(\d+)-", headers.get("range", ""))
        if found and headers.get("if-range") == etag:
            start = int(found[1])
            status, body = 206, content[start:]
            answer["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = self.cut_after.pop(0) if self.cut_after else None
        handler.send_response(status)
        for name, value in {**answer, "Content-Length": str(len(body))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body if cut is None else body[:cut])
        handler.wfile.flush()
        handler.close_connection = True
        return None


@dataclass(kw_only=True)
class Hub:
    """Repositories by `models/owner/name` or `datasets/owner/name`, at one commit."""

    url: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    token: str = "hf_good"
    down: bool = False
    statuses: list[int] = field(default_factory=list)
    """Answered first, one for each question about a repository."""
    held: dict[str, threading.Event] = field(default_factory=dict)
    """Files that are sent when their events are set."""
    requests: list[str] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(handler.path).path).strip("/")
        self.requests.append(f"{handler.command} /{path}")
        if self.down:
            return _send(handler, 503)
        api = re.fullmatch(r"api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?(?:/.*)?", path)
        if api and self.statuses:
            return _send(handler, self.statuses.pop(0))
        if api:
            return self._answer_api(handler, f"{api[1]}/{api[2]}", api[3], api[4] or "main")
        file = re.fullmatch(r"(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if file:
            return self._send_file(handler, f"{'datasets' if file[1] else 'models'}/{file[2]}", file[4])
        return _send(handler, 404)

    def _refused(self, handler: BaseHTTPRequestHandler, repository: str) -> bool:
        authorization = handler.headers.get("authorization")
        if authorization not in (None, f"Bearer {self.token}"):
            _send(handler, 401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repository not in self.repositories:
            _send(handler, 404, {"X-Error-Code": "RepoNotFound"})
        elif repository in self.gated and authorization is None:
            _send(handler, 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        else:
            return False
        return True

    def _answer_api(self, handler: BaseHTTPRequestHandler, repository: str, what: str | None, revision: str) -> None:
        if self._refused(handler, repository):
            return None
        if revision not in ("main", "v1", COMMIT):
            return _send(handler, 404, {"X-Error-Code": "RevisionNotFound"})
        files = self.repositories[repository]
        document: Any = {
            "id": repository.partition("/")[2],
            "sha": COMMIT,
            "private": False,
            "siblings": [{"rfilename": name} for name in files],
        }
        if what == "tree":
            document = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
        return _send(handler, 200, {"Content-Type": "application/json"}, json.dumps(document).encode())

    def _send_file(self, handler: BaseHTTPRequestHandler, repository: str, name: str) -> None:
        if self._refused(handler, repository):
            return None
        content = self.repositories[repository].get(name)
        if content is None:
            return _send(handler, 404, {"X-Error-Code": "EntryNotFound"})
        if handler.command == "GET":
            self.downloads.append(name)
            if name in self.held:
                self.held[name].wait(PATIENCE_S)
        headers = {
            "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Content-Type": "application/octet-stream",
            "Last-Modified": formatdate(0, usegmt=True),
        }
        return _send(handler, 200, headers, content)


@contextlib.contextmanager
def serving(server: Any) -> Iterator[Any]:
    """Answer requests for the length of a block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        def do_HEAD(self) -> None:
            server.answer(self)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    server.url = f"http://127.0.0.1:{listener.server_port}"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


def _send(
    handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str] | None = None, body: bytes = b""
) -> None:
    handler.send_response(status)
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)
