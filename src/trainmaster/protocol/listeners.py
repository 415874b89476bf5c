"""Who listens on a port of this machine's loopback address: any user of the machine can take a port that is free.

The kernel is asked (`sock_diag(7)`), for one socket at a time: to read all of `/proc/net/tcp` takes milliseconds.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from contextlib import suppress

Address = tuple[str, int]

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_ALL_STATES = 0xFFFFFFFF
_NO_COOKIE = b"\xff" * 8
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI")
_PORTS = struct.Struct("!HH")
_UID_AT = _HEADER.size + 64
"""In an answer, after the header, four bytes of state, 48 of addresses, and three numbers."""


def stranger_at(peer: Address, own: Address, uid: int | None) -> int | None:
    """The uid of whoever reads what is sent over a connection, where it is nobody who should; None where all is well.

    Call it when the connection is there and before anything is sent. On addresses of other machines it finds nobody.

    Args:
        peer: the address that was connected to.
        own: the other end of the connection.
        uid: as whom the service runs that should listen there; None: as ourselves. Root may always.
    """
    if not ipaddress.ip_address(peer[0]).is_loopback:
        return None
    trusted = {0, os.geteuid(), uid}
    nobody = ("::" if ":" in peer[0] else "0.0.0.0", 0)
    # In this order: until a connection is accepted, the listener stays; from then on, it has an owner of its own.
    for remote in (nobody, own):
        found = _uid_of(peer, remote)
        if found is not None and found not in trusted:
            return found
    return None


def _uid_of(local: Address, remote: Address) -> int | None:
    """The owner of the TCP socket with these addresses, or else of the one that listens at `local`; None: unknown."""
    family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    ends = (socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (local, remote))
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES)
    body += _PORTS.pack(local[1], remote[1]) + b"".join(ends) + bytes(4) + _NO_COOKIE
    header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    # Where the kernel does not answer such questions, or there is no such socket (a port that is translated).
    with suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.sendto(header + body, (0, 0))
        answer = kernel.recv(4096)
        if _HEADER.unpack_from(answer)[1] == _SOCK_DIAG_BY_FAMILY:
            uid: int = struct.unpack_from("=I", answer, _UID_AT)[0]
            return uid
    return None
