"""What a worker writes about itself: journal, heartbeat and exit; and the exits of workers that wrote none."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainmaster.protocol.account_files import closing
from trainmaster.protocol.documents import DISK_FULL_ERRNOS, LEAST_FREE_BYTES, disk_is_full, read_lines
from trainmaster.protocol.reasons import Reason, exit_record
from trainmaster.protocol.run_directory import CONTROL, RunDirectory, beat_document, exit_document, worker_stream

_RETRY_S = 0.5


def append(path: str, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0) as file:
        file.write(data)


class RunDirectoryGoneError(Exception):
    """The run directory was removed with its job: nobody is left to report to."""


class Journal:
    """The worker's own stream. While the disk is full, records wait in memory."""

    def __init__(self, directory: RunDirectory, node: int) -> None:
        self._path = directory.path / worker_stream(node)
        self._descriptor: int | None = None
        self._unwritten = b""

    def record(self, kind: str, **fields: object) -> None:
        line = json.dumps({"t": time.time(), "type": kind, **fields}, separators=(",", ":"))
        self._unwritten += line.encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as the disk allows; a line that was cut off is completed later."""
        try:
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags, 0o600)
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise


class Heartbeat:
    EVERY_S = 2.0

    def __init__(self, directory: RunDirectory, node: int) -> None:
        self._directory = directory
        self._name = beat_document(node)
        self._seq = 0

    def beat(self) -> None:
        """Raises RunDirectoryGoneError if the run directory is gone. A beat lost to a full disk does not matter."""
        self._seq += 1
        try:
            self._directory.put_document(self._name, {"t": time.time(), "seq": self._seq})
        except FileNotFoundError as error:
            raise RunDirectoryGoneError from error
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise


class ExitRecord:
    """The exit document, with disk space that was reserved when the worker started."""

    def __init__(self, directory: RunDirectory, node: int) -> None:
        self._target = directory.path / exit_document(node)
        self._reserve = self._target.with_name(".reserve")
        with contextlib.suppress(OSError), closing(self._open_reserve()) as descriptor:
            os.posix_fallocate(descriptor, 0, LEAST_FREE_BYTES)

    def write(self, compose: Callable[[], Mapping[str, Any]], wait: Callable[[float], None]) -> None:
        """Write the exit, composed anew for each try; `wait` is called with the seconds until the next one."""
        while True:
            try:
                self._fill_reserve(json.dumps(compose(), separators=(",", ":")).encode())
                os.replace(self._reserve, self._target)
                return
            except FileNotFoundError as error:
                raise RunDirectoryGoneError from error
            except OSError:
                wait(_RETRY_S)

    def _fill_reserve(self, data: bytes) -> None:
        # Written over the reserve, not beside it: this needs no free block and no new file.
        with closing(self._open_reserve()) as descriptor:
            written = 0
            while written < len(data):
                written += os.pwrite(descriptor, data[written:], written)
            os.ftruncate(descriptor, len(data))

    def _open_reserve(self) -> int:
        return os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)


def exit_of_lost_worker(directory: RunDirectory, node: int, end: str) -> dict[str, Any]:
    """The exit document for a worker that wrote none; `end` such as `was killed by SIGKILL`."""
    records, _ = read_lines(directory.read(worker_stream(node), 0))
    started = [record["t"] for record in records if record.get("type") == "started"]
    steps = [record["step"] for record in records if record.get("type") == "step_started"]
    reason, message = Reason.WORKER_LOST, f"the worker of node {node} {end} without reporting an end"
    if disk_is_full(directory.path):
        reason, message = Reason.DISK_FULL, f"{message}; the disk of its run directory is full"
    return exit_record(
        reason,
        message,
        step=steps[-1] if steps else None,
        stop_cause=(directory.document(CONTROL) or {}).get("stop"),
        started_at=started[0] if started else None,
        streams=dict(directory.streams()),
    )
