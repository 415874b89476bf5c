"""Bounded memory that trees are copied into before they are written; allocated once and used by every save."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_ROUND = 2 << 20
"""Buffers have the size of whole huge pages."""
_THREADS = 8


class Buffer:
    """A piece of memory; page-locked when the copies into it come from a GPU."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self._memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)
        self.pinned = False
        if pinned:
            # Touched first: while the driver page-locks untouched memory, no kernel can be launched, and that takes
            # half a second for each gigabyte. PyTorch's own pinned memory rounds every size up to a power of two.
            ctypes.memset(self._address(), 0, size)
            if code := int(_cudart().cudaHostRegister(self._address(), size, 0)):
                raise MemoryError(f"{size} bytes for copies cannot be page-locked (CUDA error {code})")
            self.pinned = True

    def __len__(self) -> int:
        return len(self._memory)

    def close(self) -> None:
        if self.pinned:
            self.pinned = False
            _cudart().cudaHostUnregister(self._address())
        # The mapping goes with the last view of it.
        self.view = memoryview(b"")

    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


class Buffers:
    """A thread-safe pool of buffers, of at most `limit` bytes; by default, half of the free memory for all ranks."""

    def __init__(self, limit: int | None = None) -> None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        self.limit = limit if limit is not None else _available_bytes() // (2 * ranks)
        self._free: list[Buffer] = []
        self._held = 0
        self._total = 0
        self._changed = threading.Condition()

    @property
    def allocated(self) -> int:
        return self._total

    def acquire(self, size: int, *, pinned: bool) -> Buffer:
        """Take a buffer of at least this size; at the limit, wait until one is released, unless nothing is held."""
        size = _rounded(size)
        with self._changed:
            while True:
                if (buffer := _best(self._free, size, pinned=pinned)) is not None:
                    self._free.remove(buffer)
                    self._held += 1
                    return buffer
                while self._free and self._total + size > self.limit:
                    self._close(self._free.pop())
                if self._total + size <= self.limit or self._held == 0:
                    self._total += size
                    self._held += 1
                    break
                self._changed.wait()
        try:
            return Buffer(size, pinned=pinned)
        except BaseException:
            with self._changed:
                self._total -= size
                self._held -= 1
                self._changed.notify_all()
            raise

    def release(self, buffer: Buffer) -> None:
        with self._changed:
            self._free.append(buffer)
            self._held -= 1
            self._changed.notify_all()

    def reserve(self, wanted: Iterable[tuple[int, bool]]) -> None:
        """Make sure that buffers of these sizes, page-locked or not, are free, as far as the limit allows."""
        missing: list[tuple[int, bool]] = []
        with self._changed:
            free = list(self._free)
            for size, pinned in wanted:
                if (buffer := _best(free, _rounded(size), pinned=pinned)) is not None:
                    free.remove(buffer)
                elif self._total + _rounded(size) <= self.limit:
                    self._total += _rounded(size)
                    missing.append((_rounded(size), pinned))
        if not missing:
            return
        with ThreadPoolExecutor(max_workers=_THREADS) as executor:
            made = [executor.submit(Buffer, size, pinned=pinned) for size, pinned in missing]
        with self._changed:
            self._free += [future.result() for future in made if future.exception() is None]
            self._total -= sum(missing[index][0] for index, future in enumerate(made) if future.exception() is not None)
            self._changed.notify_all()

    def close(self) -> None:
        """Free the memory of all buffers that nobody holds."""
        with self._changed:
            while self._free:
                self._close(self._free.pop())

    def _close(self, buffer: Buffer) -> None:
        self._total -= len(buffer)
        buffer.close()


def _available_bytes() -> int:
    """Memory that is free on this machine, or in the control group of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # No control group of our own.
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, max(0, int(limit) - used))
    return available


def _best(free: Iterable[Buffer], size: int, *, pinned: bool) -> Buffer | None:
    return min((buffer for buffer in free if len(buffer) >= size and buffer.pinned == pinned), key=len, default=None)


def _rounded(size: int) -> int:
    return max(_ROUND, -(-size // _ROUND) * _ROUND)


def _cudart() -> Any:
    return sys.modules["torch"].cuda.cudart()
