"""Delivers what a job has left in its directory for results on a node that does not share the server's files.

Files are sent in pieces under names that follow from the file, so that whoever tries again, perhaps another courier
after a crash, goes on where the server has it. What was delivered is noted beside the directory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from trainmaster.protocol.account_files import closing, directory_below, files_in_order, open_inside
from trainmaster.protocol.attempt_files import FileArea, files_route
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.run_directory import StreamGapError
from trainmaster.worker.uplink import CHUNK, RequestRefusedError, Uplink

_TIMEOUT_S = 600.0
"""The server may have to read a large file once more before it takes it."""
_TRIES = 3
"""A file that arrives damaged this often is left out."""


def name_places(request: AttemptRequest, node: int, home: Path, caches: Path) -> tuple[AttemptRequest, Results | None]:
    """Name local directories for results and caches, where the server leaves that to the node."""
    if request.output_dir:
        return request, None
    results = Results(
        home / "output", home / "delivered", attempt_id=request.attempt_id, node=node, nodes=len(request.nodes)
    )
    # All jobs of an account share what was fetched; without a name, a job has it for itself.
    account = request.engine_needs.account if request.engine_needs is not None else ""
    cache = caches / account if account else home / "cache"
    return replace(request, output_dir=str(home / "output"), cache_dir=str(cache)), results


class Results:
    """The results of one node. Links lead to files in the same directory, as in the server's lists, or are left out."""

    def __init__(self, directory: Path, notes: Path, *, attempt_id: str, node: int, nodes: int) -> None:
        self._directory = directory
        self._notes = notes
        self._attempt_id = attempt_id
        self._node = node
        self._of_several = nodes > 1

    def deliver(self, server_url: str, token: str, *, tick: Callable[[], object]) -> list[str]:
        """Send all files that were not delivered before; returns why some were not.

        `tick` is called after every piece, and while the server is away. Raises AttemptRefusedError if the server wants
        nothing more of the attempt.
        """
        if not self._directory.is_dir():
            return []
        uplink = Uplink(server_url, token, timeout_s=_TIMEOUT_S, on_wait=tick, raises_wrong=True)
        try:
            return self._deliver(uplink, tick)
        finally:
            uplink.disconnect()

    def _deliver(self, uplink: Uplink, tick: Callable[[], object]) -> list[str]:
        problems = []
        delivered = self._delivered()
        with directory_below(self._directory) as directory, open(self._notes, "a") as notes:
            for path in self._paths(directory):
                try:
                    descriptor = open_inside(directory, path)
                except FileNotFoundError:
                    continue  # a pipe, or a link that leads elsewhere
                with closing(descriptor):
                    status = os.fstat(descriptor)
                    mark = f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"
                    key = hashlib.sha256(mark.encode()).hexdigest()
                    if key in delivered:
                        continue
                    try:
                        self._send(uplink, descriptor, path, key[:32], tick)
                    except (RequestRefusedError, OSError) as error:
                        problems.append(f"{path}: {error}")
                        continue
                notes.write(json.dumps(key) + "\n")
                notes.flush()
        return problems

    def _paths(self, directory: int) -> Iterator[str]:
        for names in files_in_order(directory):
            yield "/".join(names)

    def _delivered(self) -> set[str]:
        try:
            return {line.strip().strip('"') for line in self._notes.read_text().splitlines()}
        except FileNotFoundError:
            return set()

    def _send(self, uplink: Uplink, descriptor: int, path: str, upload: str, tick: Callable[[], object]) -> None:
        route = f"{files_route(self._attempt_id)}/{FileArea.OUTPUT}/{quote(path)}"
        node = f"&node={self._node}" if self._of_several else ""
        for number in range(_TRIES):
            # Another name after a failure: the server may keep what is wrong with the first for a while.
            name = upload if not number else f"{upload}-{number}"
            try:
                self._send_once(uplink, descriptor, f"{route}?upload={name}", node, tick)
                return
            except RequestRefusedError:
                if number == _TRIES - 1:
                    raise

    def _send_once(self, uplink: Uplink, descriptor: int, address: str, node: str, tick: Callable[[], object]) -> None:
        digest, hashed, offset = hashlib.sha256(), 0, 0
        # Asks where to begin, too: an earlier courier may have sent a part.
        start = self._piece(uplink, address, 0, b"")
        while True:
            data = os.pread(descriptor, CHUNK, offset)
            if offset + len(data) > hashed:
                digest.update(data[hashed - offset :])
                hashed = offset + len(data)
            tick()
            if data and offset + len(data) <= start:
                offset += len(data)  # the server has it
                continue
            if data:
                offset = start = self._piece(uplink, address, offset, data)
                continue
            try:
                uplink.ask("POST", f"{address}&size={hashed}&sha256={digest.hexdigest()}{node}")
                return
            except StreamGapError as gap:
                offset = start = gap.next_offset

    def _piece(self, uplink: Uplink, address: str, offset: int, data: bytes) -> int:
        try:
            return int(uplink.ask("PUT", f"{address}&offset={offset}", data=data)["next_offset"])
        except StreamGapError as gap:
            return gap.next_offset
