"""A rank's stream on disk: JSON objects, one a line, appended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any


class Journal:
    """Appends records to one file. Without a path it does nothing.

    The descriptor stays open: with O_APPEND also a forked child writes whole lines at the end.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._torn = False

    def append(self, record: Mapping[str, Any], *, sync: bool = False) -> None:
        """Write one record with the time of now, as one write.

        Raises:
            OSError: the record is not (or not wholly) in the file.
        """
        if self._path is None:
            return
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        line = json.dumps({"t": time.time(), **record}, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        if self._torn:
            # Part of a record was written when the disk was full: end it, or it swallows this one too.
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        self._torn = written < len(line)
        if self._torn:
            raise OSError(f"wrote {written} of {len(line)} bytes to {self._path}")
        if sync:
            os.fsync(self._descriptor)
