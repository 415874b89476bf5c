"""The readiness probe: what counts as an answer of a service."""

from __future__ import annotations

import os
import selectors
import socket

import pytest

from attacker import UID, squatting
from trainmaster.protocol.launch import Readiness
from trainmaster.worker.local_http import ReadinessProbe


@pytest.mark.parametrize(
    ("answer", "ready"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.1 302 Found\r\n\r\n", True),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", False),
        (b"HTTP/1.1 -5 OK\r\n\r\n", False),
        (b"HTTP/1.1 " + b"1" * 5000 + b"\r\n\r\n", False),
        (b"hello\r\n", False),
        (b"a" * (1 << 20), False),
    ],
)
def test_answer_of_a_service_is_judged_by_a_bounded_first_line(answer: bytes, ready: bool) -> None:
    with selectors.DefaultSelector() as selector, socket.create_server(("127.0.0.1", 0)) as service:
        host, port = service.getsockname()
        probe = ReadinessProbe(selector, host, port, Readiness(path="/", timeout_s=60.0, interval_s=60.0), 0.0)
        probe.advance(0.0)
        accepted, _ = service.accept()
        with accepted:
            accepted.setblocking(False)
            sent = 0
            while selector.get_map():
                if sent < len(answer):
                    try:
                        sent += accepted.send(answer[sent:])
                    except OSError:
                        sent = len(answer)  # it has heard enough
                for key, _ in selector.select(0.01):
                    key.data()
        assert probe.is_ready is ready
        assert len(probe.failure(60.0) or "") < 200


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("uid", [None, UID + 1, UID])
def test_answer_of_another_user_on_the_port_does_not_make_a_service_ready(uid: int | None) -> None:
    with selectors.DefaultSelector() as selector, squatting() as squatter:
        readiness = Readiness(path="/", timeout_s=60.0, interval_s=60.0)
        probe = ReadinessProbe(selector, "127.0.0.1", squatter.port, readiness, 0.0, uid=uid)
        probe.advance(0.0)
        while selector.get_map():
            for key, _ in selector.select(1.0):
                key.data()
        assert probe.is_ready is (uid == UID)
    if uid != UID:
        assert f"is taken by another user, with uid {UID}" in (probe.failure(60.0) or "")
        assert squatter.received == b""
