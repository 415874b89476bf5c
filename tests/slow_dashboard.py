"""A way to a Ray dashboard that is slow, and now and then has too many requests."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from patience import PATIENCE_S

DELAY_S = 1.0


class _Handler(BaseHTTPRequestHandler):
    server: SlowDashboard

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.pause.wait(DELAY_S)
        if next(self.server.numbers) % 3 == 2:
            answer = httpx.Response(429, text="later")
        else:
            kept = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            answer = self.server.upstream.request(self.command, self.path, headers=kept, content=body)
        self.send_response(answer.status_code)
        self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(answer.content)

    do_GET = do_POST = do_PUT = do_DELETE = answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


class SlowDashboard(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = httpx.Client(base_url=target, timeout=PATIENCE_S, trust_env=False)
        self.numbers = itertools.count()
        self.pause = threading.Event()
        """Set when it ends."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def slow_dashboard(target: str) -> Iterator[SlowDashboard]:
    with SlowDashboard(target) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,))
        thread.start()
        try:
            yield server
        finally:
            server.pause.set()
            server.shutdown()
            thread.join()
            server.upstream.close()
