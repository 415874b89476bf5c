"""A proxy that loses answers: what was asked is done, and the client is told that it was not."""

from __future__ import annotations

import json
import threading
from collections import Counter
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from patience import PATIENCE_S

_PASSED_ON = ("content-type", "content-encoding", "accept", "x-idempotency-key", "x-trainmaster-door")


class ForgetfulProxy:
    """In front of another server, for as long as it is entered."""

    def __init__(self, url: str, *, lose: dict[str, int] | None = None, config: dict[str, Any] | None = None) -> None:
        """Pass requests on to `url`.

        Args:
            url: of the server.
            lose: by the last part of an address, how many of its answers are replaced by 503.
            config: what `client/config` answers instead.
        """
        self._lose = Counter(lose or {})
        self._config = config
        self._lock = threading.Lock()
        self.lost = 0
        self.asked: Counter[str] = Counter()
        self.encodings: Counter[str] = Counter()
        self.sent_away = threading.Event()
        """Set when a request was refused for want of room."""
        self.try_again = 0
        """How many polls were told that there is nothing yet."""
        upstream = httpx.Client(
            base_url=url, verify=False, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None)
        )
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self._pass_on()

            def do_GET(self) -> None:
                self._pass_on()

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name: self.headers[name] for name in _PASSED_ON if name in self.headers}
                answer = upstream.request(self.command, self.path, content=body, headers=headers)
                status, content = proxy._replaced(self.path, headers, answer)
                self.send_response(status)
                self.send_header("Content-Type", answer.headers.get("content-type", "application/json"))
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._upstream = upstream
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> ForgetfulProxy:
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._upstream.close()

    def _replaced(self, path: str, headers: dict[str, str], answer: httpx.Response) -> tuple[int, bytes]:
        name = path.rpartition("/")[2]
        with self._lock:
            self.asked[name] += 1
            if answer.status_code == HTTPStatus.TOO_MANY_REQUESTS:
                self.sent_away.set()
            self.try_again += answer.content.startswith(b'{"type":"try_again"')
            self.encodings[headers.get("content-encoding", "")] += 1
            if self._lose[name] > 0:
                self._lose[name] -= 1
                self.lost += 1
                return 503, b'{"error":"the answer was lost"}'
        if path.endswith("client/config") and self._config is not None:
            return 200, json.dumps(self._config).encode()
        return answer.status_code, answer.content
