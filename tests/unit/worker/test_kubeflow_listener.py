"""Reports in Kubeflow's form: no request, however malformed, ends the worker or keeps others from being heard."""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from patience import PATIENCE_S
from trainmaster.worker.local_http import KubeflowListener

TOKEN = "token"
GOOD = json.dumps({"trainerStatus": {"progressPercentage": 40}}).encode()


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        yield selector


@pytest.fixture
def listener(selector: selectors.BaseSelector, tmp_path: Path) -> Iterator[KubeflowListener]:
    listener = KubeflowListener(selector, TOKEN, str(tmp_path / "metrics.jsonl"))
    yield listener
    listener.close()


def answer_to(request: bytes, selector: selectors.BaseSelector, listener: KubeflowListener) -> bytes:
    """The status line of the answer to a request after which nothing more comes; empty when there is none."""
    with socket.create_connection(("127.0.0.1", urlsplit(listener.url).port or 0), timeout=PATIENCE_S) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        client.setblocking(False)
        received = b""
        while True:
            for key, _ in selector.select(0.01):
                key.data()  # as the worker does: what it raises would end it
            try:
                piece = client.recv(65536)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                piece = b""
            received += piece
            if not piece:
                return received.partition(b"\r\n")[0]


def post(*headers: bytes, body: bytes = b"", token: str = TOKEN) -> bytes:
    lines = (b"POST / HTTP/1.1", f"Authorization: Bearer {token}".encode(), *headers)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def report(body: bytes) -> bytes:
    return post(b"Content-Length: %d" % len(body), body=body)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (post(b"Content-Length: " + b"9" * 5000, token="nobody"), b"413"),
        (post(b"Content-Length: " + b"9" * 5000), b"413"),
        (post(b"Content-Length: 1048577"), b"413"),
        (post(b"Content-Length: -1"), b"400"),
        (post(b"Content-Length: 1e3"), b"400"),
        (post(b"Content-Length: \xb2"), b"400"),
        (post(b"Content-Length: "), b"400"),
        (post(b"Content-Length: 1", b"Content-Length: 2", body=b"{}"), b"400"),
        (post(b"Content-Length: 2", body=b"{}", token="nobody"), b"401"),
        (post(), b"400"),
        (report(b"[" * 100_000), b"400"),
        (report(b"9" * 100_000), b"400"),
        (report(b"\xff\xfe"), b"400"),
        (report(GOOD), b"200"),
        (post(b"Content-Length: 100", body=b"half"), b""),
        (b"\xff" * 100_000, b""),
        (b"", b""),
    ],
)
def test_odd_request_is_answered_and_the_next_one_is_heard(
    selector: selectors.BaseSelector, listener: KubeflowListener, tmp_path: Path, request_: bytes, status: bytes
) -> None:
    line = answer_to(request_, selector, listener)
    assert line.split()[1:2] == ([status] if status else [])
    assert answer_to(report(GOOD), selector, listener) == b"HTTP/1.1 200 OK"
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["percent"] == 40.0
