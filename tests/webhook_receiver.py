"""A real receiver of webhooks for tests: it notes what arrives, and answers as it is told to."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from patience import PATIENCE_S
from trainmaster.client import verify_webhook

HANG = 0
"""Instead of a status: never answer."""


@dataclass(kw_only=True)
class Receiver:
    """What came, in order, and what is answered next; 200 when nothing else was said."""

    secret: str = "a secret for tests"
    url: str = ""
    answers: list[int] = field(default_factory=list)
    arrived: list[dict[str, Any]] = field(default_factory=list)
    """Every request: its headers, its body and what was answered."""
    released: threading.Event = field(default_factory=threading.Event)

    @property
    def taken(self) -> list[dict[str, Any]]:
        """The documents that were taken; each was checked against the secret."""
        return [
            verify_webhook(self.secret, request["headers"], request["body"])
            for request in list(self.arrived)
            if request["answer"] == 200
        ]

    @property
    def statuses(self) -> list[str]:
        """The statuses that were told and taken."""
        return [event["job"]["status"] for event in self.taken if event["job"]]


@contextlib.contextmanager
def receiving(*answers: int, port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """A receiver that listens for the length of a block."""
    receiver = Receiver(answers=list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = receiver.answers.pop(0) if receiver.answers else 200
            receiver.arrived.append({"headers": dict(self.headers), "body": body, "answer": answer, "path": self.path})
            if answer == HANG:
                receiver.released.wait(PATIENCE_S)
                return
            self.send_response(answer)
            if 300 <= answer < 400:
                self.send_header("Location", receiver.url + "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        receiver.url = f"http://127.0.0.1:{server.server_port}/hook"
        try:
            yield receiver
        finally:
            receiver.released.set()
            server.shutdown()
            thread.join()
