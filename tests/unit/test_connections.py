"""Connections of somebody who can do no more than open them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from patience import PATIENCE_S
from tls_files import self_signed
from trainmaster.server.settings.listener import CIPHERS, MAX_HEAD_BYTES, BoundedProtocol


class Hasty(BoundedProtocol):
    head_within_s = 0.5


async def application(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/slow":
        await asyncio.sleep(4 * Hasty.head_within_s)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.contextmanager
def serving(protocol: type[BoundedProtocol], **options: Any) -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, http=protocol, lifespan="off", log_config=None, **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield listener.getsockname()
    finally:
        server.should_exit = True
        thread.join()


def answer_of(connection: socket.socket) -> bytes:
    """All that comes until the server closes; nothing when it is not even reading any more."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            received += piece
    return received


@pytest.mark.parametrize("endless", [b"GET /", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n"])
def test_head_without_end_is_cut_off(endless: bytes) -> None:
    filling = b"X: y\r\n" if endless.endswith(b"\n") else b"a"
    with serving(BoundedProtocol) as address, socket.create_connection(address, timeout=PATIENCE_S) as connection:
        connection.sendall(endless)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 64 * MAX_HEAD_BYTES:
                connection.sendall(filling * (4096 // len(filling)))
                sent += 4096
        assert sent < 64 * MAX_HEAD_BYTES


def test_head_within_the_bound_is_answered_again_and_again() -> None:
    head = b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n\r\n"
    with serving(BoundedProtocol) as address, socket.create_connection(address, timeout=PATIENCE_S) as connection:
        for _ in range(5):
            connection.sendall(head)
            received = b""
            while not received.endswith(b"\r\n\r\nok"):
                received += connection.recv(65536)
            assert received.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("begun", [b"", b"\r\n", b"GET / HTTP/1.1\r\nHost: h\r\n"])
def test_connection_without_a_request_is_closed(begun: bytes) -> None:
    with serving(Hasty) as address, socket.create_connection(address, timeout=PATIENCE_S) as connection:
        connection.sendall(begun)
        assert answer_of(connection) == b""


def test_connection_whose_next_request_never_begins_is_closed() -> None:
    with (
        serving(Hasty, timeout_keep_alive=3600) as address,
        socket.create_connection(address, timeout=PATIENCE_S) as connection,
    ):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.sendall(b"\r\n")
        answer_of(connection)


def test_answer_may_take_longer_than_the_head_of_a_request() -> None:
    with serving(Hasty) as address, socket.create_connection(address, timeout=PATIENCE_S) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert answer_of(connection).endswith(b"ok")


def test_tls_offers_nothing_but_ciphers_with_forward_secrecy_and_integrity(tmp_path: Path) -> None:
    files = self_signed(tmp_path)
    client = ssl.create_default_context(cafile=str(files.cert))
    client.check_hostname = False
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    secured = {"ssl_certfile": files.cert, "ssl_keyfile": files.key, "ssl_ciphers": CIPHERS}
    with serving(BoundedProtocol, **secured) as address:
        with client.wrap_socket(socket.create_connection(address, timeout=PATIENCE_S)) as connection:
            name, version, _ = connection.cipher() or ("", "", 0)
            assert version == "TLSv1.2"
            assert name.startswith("ECDHE-")
            assert "GCM" in name or "CHACHA20" in name
        client.set_ciphers("AES128-SHA:ECDHE-RSA-AES128-SHA:ECDHE-ECDSA-AES128-SHA")
        with (
            pytest.raises((ssl.SSLError, ConnectionError)),
            client.wrap_socket(socket.create_connection(address, timeout=PATIENCE_S)),
        ):
            pass
