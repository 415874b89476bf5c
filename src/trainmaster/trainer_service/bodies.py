"""Bodies too large to copy about: bytes in a file without a name, which another process can map."""

from __future__ import annotations

import mmap
import os
import resource
import tempfile

INLINE_BYTES = 65_536
"""Up to here a body is copied; above, it is shared."""


class SharedBody:
    """Bytes that are written once, then mapped: here, and in the process that gets the descriptor."""

    def __init__(self, *, on_disk: bool = False) -> None:
        """Make an empty one: in memory, or in a file on disk where memory is short."""
        if on_disk:
            with tempfile.TemporaryFile(prefix="trainmaster-body-", buffering=0) as file:
                self.fd = os.dup(file.fileno())
        else:
            self.fd = os.memfd_create("trainmaster-body", os.MFD_CLOEXEC)
        self.size = 0

    @classmethod
    def of(cls, data: bytes | memoryview) -> SharedBody:
        """Share bytes that are already here."""
        body = cls()
        try:
            body.write(data)
        except BaseException:
            body.close()
            raise
        return body

    def write(self, data: bytes | memoryview) -> None:
        """Append."""
        view = memoryview(data)
        while view:
            written = os.write(self.fd, view)
            self.size += written
            view = view[written:]

    def read(self, offset: int, count: int) -> bytes:
        """Some of the bytes, copied."""
        return os.pread(self.fd, count, offset)

    def map(self) -> memoryview:
        """All of the bytes; they stay mapped as long as somebody holds the view."""
        return mapped(self.fd, self.size)

    def close(self) -> None:
        """Let go of the descriptor; views stay."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def mapped(fd: int, size: int) -> memoryview:
    """The first `size` bytes of a file, read-only; has a descriptor of its own for as long as somebody holds them."""
    return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ)) if size else memoryview(b"")


def allow_many_descriptors() -> int:
    """Let this process have as many as it may; how many those are. Each body takes one, here and where it is mapped."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
