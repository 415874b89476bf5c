"""Sockets: which addresses are public, who listens on a loopback port, long paths of Unix sockets, and hints."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
"""All IPv6 addresses assigned for use on the Internet."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""The only translation prefix outside of it that stands for public addresses."""
_SPECIAL = tuple(
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",  # for protocols; some Pythons take parts of it for global
        "192.88.99.0/24",  # relays of 6to4
        "2001::/23",  # for protocols, as Teredo, which leads to IPv4 addresses; some Pythons take parts for global
        "2002::/16",  # 6to4: leads to an IPv4 address
        "3fff::/20",  # for documentation; older Pythons do not know it
    )
)


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address is on the public Internet; an IPv4 address wrapped in IPv6 counts as itself."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64 or address.ipv4_mapped is not None:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if address not in _GLOBAL_UNICAST:
            return False
    return address.is_global and not address.is_multicast and not any(address in network for network in _SPECIAL)


def resolve(host: str, port: int | None = None) -> dict[str, bool]:
    """The addresses of a host, in the order in which to try them, and whether each is public; raises if it has none."""
    found = dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    return {address: is_public(ipaddress.ip_address(address.partition("%")[0])) for address in found}


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
"""Offset in an answer: header, 4 bytes of state, 48 bytes of addresses, three numbers."""


def untrusted_listener(peer: Address, own: Address, uid: int | None) -> int | None:
    """The uid of an untrusted process that would receive what is sent over a loopback connection, or None.

    Any user of a machine can listen on a free loopback port. Call this once connected, from `own` to `peer`, and before
    sending anything. The service runs as `uid`, or as this process's user; root is always trusted. It asks the kernel
    (`sock_diag(7)`) for one socket: reading all of `/proc/net/tcp` takes milliseconds.
    """
    if not ipaddress.ip_address(peer[0]).is_loopback:
        return None
    trusted = {0, os.geteuid(), uid}
    nobody = ("::" if ":" in peer[0] else "0.0.0.0", 0)
    # In this order: until the connection is accepted, the listener exists; afterwards the connection has its own owner.
    for remote in (nobody, own):
        found = _uid_of(peer, remote)
        if found is not None and found not in trusted:
            return found
    return None


def _uid_of(local: Address, remote: Address) -> int | None:
    """The owner of the TCP socket with these addresses, else of the socket that listens at `local`; None: unknown."""
    family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    ends = (socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (local, remote))
    body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES)
    body += _PORTS.pack(local[1], remote[1]) + b"".join(ends) + bytes(4) + _NO_COOKIE
    header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    # The kernel may not answer such queries, and a translated port has no socket here.
    with contextlib.suppress(OSError), socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(1.0)
        kernel.sendto(header + body, (0, 0))
        answer = kernel.recv(4096)
        if _HEADER.unpack_from(answer)[1] == _SOCK_DIAG_BY_FAMILY:
            return int(struct.unpack_from("=I", answer, _UID_AT)[0])
    return None


_LONGEST_SOCKET_PATH = 100
"""Close to the kernel's limit for Unix sockets."""


@contextlib.contextmanager
def reachable(path: str | os.PathLike[str]) -> Iterator[str]:
    """A path to the same socket that is short enough to bind or connect to, while the context lasts."""
    plain = os.fspath(path)
    if len(os.fsencode(plain)) <= _LONGEST_SOCKET_PATH:
        yield plain
        return
    directory = os.open(Path(plain).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{Path(plain).name}"
    finally:
        os.close(directory)


# Hints are datagrams that say "look now". They carry no state and may be lost; receivers also poll.

_MOST_AT_ONCE = 1000
"""Any process of the same user may send hints without end."""
_LONGEST_SUBJECT = 256


def send_hint(path: str | None, subject: str) -> None:
    """Tell the listener at `path` that `subject` changed. Never blocks, never fails."""
    if not path:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        with reachable(path) as short:
            sender.sendto(subject.encode(), short)


class HintListener:
    def __init__(self, path: Path) -> None:
        self.path = path
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with reachable(path) as short:
            self._socket.bind(short)
        path.chmod(0o600)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def drain(self) -> set[str]:
        """The subjects of the hints since the last call; of a flood, the first ones."""
        subjects: set[str] = set()
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_AT_ONCE):
                subjects.add(self._socket.recv(_LONGEST_SUBJECT).decode(errors="replace"))
        return subjects

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
