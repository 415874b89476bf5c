"""Mirrors a run directory of this node to the server: streams and documents go up, the ranks' meeting place comes down.

What the server has acknowledged is remembered; after a crash it is asked for again, stream by stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from trainmaster.protocol.run_directory import (
    RENDEZVOUS,
    Gap,
    RunDirectory,
    StreamGapError,
    beat_document,
    endpoint_document,
    gap_document,
)
from trainmaster.worker.uplink import CHUNK, AttemptRefusedError, Uplink

MOST_REPORT_BYTES = 1 << 30
"""Of a stream that is no log: a rank can make a file terabytes long, and fill the server's disk, without writing."""


class Mirror:
    def __init__(self, uplink: Uplink, route: str, run: RunDirectory, node: int, *, tick: Callable[[], object]) -> None:
        """`route` is that of the attempt; `tick` is called before every piece of a stream."""
        self._uplink = uplink
        self._route = route
        self._run = run
        self._node = node
        self._tick = tick
        self._awaits_rendezvous = node > 0
        self._offsets: dict[str, int] = {}
        self._gaps: dict[str, Gap] = {}
        self._delivered: dict[str, dict[str, Any]] = {}

    def turn(self) -> None:
        """Send what is new. Raises AttemptRefusedError if the server wants nothing more of the attempt."""
        self._push_documents()
        self._push_streams()
        self._pull_rendezvous()

    def put(self, name: str, document: dict[str, Any]) -> None:
        self._uplink.ask("PUT", f"{self._route}/documents/{name}", document=document)

    def _push_documents(self) -> None:
        names = [beat_document(self._node), endpoint_document(self._node)]
        for name in [RENDEZVOUS, *names] if self._node == 0 else names:
            document = self._run.document(name)
            if document is not None and document != self._delivered.get(name):
                self.put(name, document)
                self._delivered[name] = document

    def _push_streams(self) -> None:
        for name, length in self._run.streams():
            size = length if "/logs/" in name else min(length, MOST_REPORT_BYTES)
            offset = self._offsets.get(name, 0)
            while True:
                data = self._run.read(name, offset, min(CHUNK, size - offset)) if offset < size else b""
                if (gap := self._run.gap(name)) is not None and offset < gap.start:
                    data = data[: gap.start - offset]
                elif gap is not None and (offset < gap.end or gap != self._gaps.get(name)):
                    self.put(gap_document(name), gap.to_json())
                    self._gaps[name] = gap
                    self._offsets[name] = offset = max(offset, gap.end)
                    continue
                if not data:
                    break  # All is sent; or somebody cut the file short, and what is gone cannot be.
                self._tick()
                try:
                    answer = self._uplink.ask("POST", f"{self._route}/streams/{name}?offset={offset}", data=data)
                    offset = int(answer["next_offset"])
                except StreamGapError as gap_error:
                    offset = gap_error.next_offset
                self._offsets[name] = offset

    def _pull_rendezvous(self) -> None:
        # Not there yet, or no disk space: the next turn asks again.
        with contextlib.suppress(AttemptRefusedError, OSError):
            if self._awaits_rendezvous:
                self._run.put_document(RENDEZVOUS, self._uplink.ask("GET", f"{self._route}/documents/{RENDEZVOUS}"))
                self._awaits_rendezvous = False
