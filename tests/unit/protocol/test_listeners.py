"""Who reads what is sent to a port of this machine."""

from __future__ import annotations

import os
import socket

import pytest

from attacker import UID, squatting
from trainmaster.protocol.sockets import untrusted_listener

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def stranger(connection: socket.socket, uid: int | None = None) -> int | None:
    return untrusted_listener(connection.getpeername()[:2], connection.getsockname()[:2], uid)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_own_listener_is_no_stranger(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]) as connection:
            assert stranger(connection) is None


@as_root
@pytest.mark.parametrize("leaves", [False, True])
def test_another_user_who_listens_is_a_stranger(leaves: bool) -> None:
    with squatting(leaves=leaves) as squatter, socket.create_connection(("127.0.0.1", squatter.port)) as connection:
        if leaves:
            assert connection.recv(1) == b"H"  # its listener is gone
        assert stranger(connection) == UID
        assert stranger(connection, UID + 1) == UID
        assert stranger(connection, UID) is None


def test_other_machines_are_not_looked_at() -> None:
    assert untrusted_listener(("192.0.2.1", 80), ("192.0.2.2", 1024), None) is None
