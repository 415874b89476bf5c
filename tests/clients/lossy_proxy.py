"""A way to a server on which answers get lost: it did what it was asked, and the client does not learn of it."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from patience import PATIENCE_S

WORK = ("forward_backward", "forward", "optim_step", "save_weights", "save_weights_for_sampler", "asample")
"""Routes whose acknowledgements get lost."""
RESULT = "retrieve_future"
"""Where results get lost; never by a cut of the line, after which clients wait for seconds before they ask again."""


class LossyProxy:
    """Passes everything on; of the answers about work, every third one is lost."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.lost: list[str] = []
        self._counter = itertools.count()
        self._upstream = httpx.Client(timeout=PATIENCE_S, trust_env=False)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def loses(self, path: str) -> bool:
        """Whether the answer to this one is lost."""
        route = path.rpartition("/")[2]
        if route not in (*WORK, RESULT) or next(self._counter) % 3 != 1:
            return False
        self.lost.append(route)
        return True

    def pass_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> httpx.Response:
        """What the server answers."""
        return self._upstream.request(method, self.target + path, headers=headers, content=body)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                answer = proxy.pass_on(self.command, self.path, headers, body)
                if not proxy.loses(self.path):
                    self._answer(answer.status_code, answer.headers.get("Content-Type", ""), answer.content)
                elif proxy.lost[-1] == RESULT or len(proxy.lost) % 2:
                    self._answer(503, "application/json", b"{}")
                else:  # the line is cut
                    self.close_connection = True
                    with contextlib.suppress(OSError):
                        self.connection.shutdown(socket.SHUT_RDWR)

            def _answer(self, status: int, kind: str, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_DELETE = _pass_on  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        return Handler

    @contextlib.contextmanager
    def serving(self) -> Iterator[LossyProxy]:
        """Serve for the length of a block."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()
            self._upstream.close()
