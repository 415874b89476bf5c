"""Hints: datagrams that say "look now". They carry no state and may be lost; receivers also poll."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from trainmaster.protocol.addresses import reachable

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
