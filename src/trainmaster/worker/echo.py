"""Prints the output of a node's first rank on the worker's own, for those who read the engine's log of the worker.

The log of the job is what the courier delivers; this is a copy, whole line by line, which may end early.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator

from trainmaster.protocol.run_directory import RunDirectory

EVERY_S = 0.2
MOST_LINE_BYTES = 64 << 10
"""A longer line is printed in pieces."""
_END_S = 2.0
"""How long the last lines may take: whoever reads them may be slow, or hang."""
_DESCRIPTORS = {"out": 1, "err": 2}


class Echo:
    def __init__(self, run: RunDirectory, node: int, *, first_rank: int) -> None:
        self._run = run
        self._node = node
        self._log = re.compile(rf"nodes/{node}/logs/[^/]+\.{first_rank}\.(out|err)")
        self._offsets: dict[str, int] = {}
        self._done = threading.Event()

    @contextlib.contextmanager
    def printing(self) -> Iterator[None]:
        """Print what is written meanwhile, in a thread of its own."""
        thread = threading.Thread(target=self._follow, name="echo", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join(_END_S)

    def _follow(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or the directory is gone
            while not self._done.wait(EVERY_S):
                self._turn(ended=False)
            self._turn(ended=True)

    def _turn(self, *, ended: bool) -> None:
        for name, size in self._run.streams(self._node):
            if (found := self._log.fullmatch(name)) is not None:
                while self._print(name, size, _DESCRIPTORS[found[1]], ended=ended):
                    pass

    def _print(self, name: str, size: int, descriptor: int, *, ended: bool) -> bool:
        """Print the next lines of a log; whether there may be more."""
        offset = self._offsets.get(name, 0)
        data = self._run.read(name, offset, min(MOST_LINE_BYTES, size - offset)) if offset < size else b""
        if (gap := self._run.gap(name)) is not None and gap.start < offset + len(data) and offset < gap.end:
            data = data[: max(0, gap.start - offset)]
            if not data:
                self._offsets[name] = gap.end
                return True
        whole = data if ended or len(data) == MOST_LINE_BYTES else data[: data.rfind(b"\n") + 1]
        while whole:
            written = os.write(descriptor, whole)
            whole = whole[written:]
            offset += written
        moved, self._offsets[name] = offset != self._offsets.get(name, 0), offset
        return moved
