"""The files by which a rank and its attempt communicate: control file, owner file and record streams."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.protocol import environment
from trainmaster.protocol.documents import read_document
from trainmaster.protocol.reasons import StopCause
from trainmaster.protocol.request import Control

LOOK_EVERY_S = 0.05
"""The longest delay of a stop request; a training step is rarely shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A request to stop: save if `save` is set, then exit by `report.exit_stopped()`."""

    cause: StopCause
    save: bool
    deadline: float
    """Unix time after which the rank is killed."""

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.time())


class ControlReader:
    """Reads the server's requests from the control file, if any; cheap enough for every step. Not thread-safe."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._next_look = 0.0
        self._seq = -1
        self._stop: Stop | None = None
        self._save_wanted = False

    def stop(self) -> Stop | None:
        """The requested stop. It is never withdrawn, but a later one may replace it."""
        self._look()
        return self._stop

    def take_save(self) -> bool:
        """Whether a save without a stop was requested since the last call."""
        self._look()
        wanted, self._save_wanted = self._save_wanted, False
        return wanted

    def _look(self) -> None:
        now = time.monotonic()
        if self._path is None or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        try:
            if (document := read_document(Path(self._path))) is None:
                return
            control = Control.from_json(document)
            written_at = os.stat(self._path).st_mtime
        except (OSError, ValueError, TypeError):
            return  # Not readable by this version: the worker enforces a stop anyway.
        if control.seq <= self._seq:
            return
        self._seq = control.seq
        if control.stop is not None:
            self._stop = Stop(cause=control.stop, save=control.save, deadline=written_at + control.grace_s)
        elif control.save:
            self._save_wanted = True


ANSWER_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_REFUSED = frozenset({401, 403, 404, 410})
"""The server refuses, or does not know the job any more. Any other status is no answer."""


class NotOwnerError(RuntimeError):
    """Another attempt owns the job now: this one must not commit anything any more."""


def require_ownership(environ: Mapping[str, str]) -> None:
    """Raise NotOwnerError in a job that another attempt owns; waits for an unreachable server: unknown is not owned."""
    if url := environ.get(environment.OWNER_URL):
        owned = _ask_server(url, _token(environ), environ.get(environment.CA))
    elif path := environ.get(environment.OWNER_FILE):
        owner = read_document(Path(path))
        owned = owner is not None and owner.get("token") == _token(environ)
    else:
        return
    if not owned:
        raise NotOwnerError(
            f"attempt {environ.get(environment.ATTEMPT_ID, '')} no longer owns its job: nothing was committed"
        )


def _token(environ: Mapping[str, str]) -> str:
    return Path(environ[environment.TOKEN_FILE]).read_text().strip()


def _ask_server(url: str, token: str, ca: str | None) -> bool:
    # Imported here: most jobs share the server's files and need none of it.
    import http.client
    import ssl
    import urllib.error
    import urllib.request

    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=ca)))
    direct = urllib.request.build_opener(*handlers)
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            with direct.open(request, timeout=ANSWER_TIMEOUT_S) as response:
                return bool(json.load(response)["data"]["owner"])
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in _REFUSED:
                return False
            problem: Exception = error
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            problem = error
        if pause_s == _FIRST_PAUSE_S:
            sys.stderr.write(f"trainmaster: waiting for the server before a checkpoint is committed: {problem}\n")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class RecordStream:
    """A rank's stream on disk, one JSON object a line, also from forked children. Without a path, all is dropped."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._torn = False

    def append(self, record: Mapping[str, Any], *, sync: bool = False) -> None:
        """Append a record with the current time in a single write; raises OSError if not all of it was written."""
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
