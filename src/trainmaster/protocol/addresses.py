"""Network and socket addresses: public IP addresses, listeners on loopback ports, and long paths of Unix sockets."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is given out for use on the Internet."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""The one translation prefix outside of that which stands for public addresses too."""
_SPECIAL = tuple(
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",  # for protocols; some Pythons take parts of it for global
        "192.88.99.0/24",  # relays of 6to4
        "2001::/32",  # Teredo: leads to an IPv4 address and port
        "2002::/16",  # 6to4: leads to an IPv4 address
        "3fff::/20",  # for documentation; older Pythons do not know it
    )
)


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address is one of the public Internet, also where IPv6 only wraps an IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64 or address.ipv4_mapped is not None:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _GLOBAL_UNICAST:
            return False
    return address.is_global and not address.is_multicast and not any(address in network for network in _SPECIAL)


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

    Any user of a machine can listen on a free port of its loopback address. Call this when the connection is there and
    before anything is sent. On addresses of other machines it finds nobody.

    It asks the kernel (`sock_diag(7)`) for one socket: reading all of `/proc/net/tcp` takes milliseconds.

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
    with contextlib.suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.sendto(header + body, (0, 0))
        answer = kernel.recv(4096)
        if _HEADER.unpack_from(answer)[1] == _SOCK_DIAG_BY_FAMILY:
            uid: int = struct.unpack_from("=I", answer, _UID_AT)[0]
            return uid
    return None


_LONGEST_SOCKET_PATH = 100
"""About what the kernel allows for a Unix socket."""


@contextlib.contextmanager
def reachable(path: str | os.PathLike[str]) -> Iterator[str]:
    """A path to the same socket that is short enough to bind or to connect to, while the context lasts."""
    plain = os.fspath(path)
    if len(os.fsencode(plain)) <= _LONGEST_SOCKET_PATH:
        yield plain
        return
    directory = os.open(Path(plain).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{Path(plain).name}"
    finally:
        os.close(directory)
