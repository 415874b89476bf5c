"""The server's log: how lines look, and what they say of the request that they belong to.

A line that names a job has its id in a field of its own. Neither bodies nor credentials are ever logged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from trainmaster.server.settings.settings import LogFormat, Settings

ACCESS = logging.getLogger("trainmaster.server.http.access")
"""Has a line for each request."""

_JOB = re.compile(r"\b(job-[a-z0-9]{12})\b(?:\.([0-9]+)\b)?")
_CHATTY = ("alembic", "httpx", "httpcore")
_VISIBLE = {number: f"\\x{number:02x}" for number in (*range(0x20), *range(0x7F, 0xA0))}
"""What clients name may hold a line end, and what looks like a line of ours behind it."""
_request: ContextVar[Mapping[str, Any] | None] = ContextVar("request", default=None)


def configure(settings: Settings) -> None:
    """Log to stderr as the settings say."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings.log_format is LogFormat.JSON else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


def access_level(settings: Settings) -> int:
    """The level of the lines for each request: programs that read logs want them, people rarely."""
    return logging.INFO if settings.log_format is LogFormat.JSON else logging.DEBUG


def belong_to(request: Mapping[str, Any]) -> None:
    """Have every line that this task logs from now on, and those that it starts, say which request it is about."""
    _request.set(request)


class TextLines(logging.Formatter):
    """Lines for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base calls it so
        """The line, with the request's id, key and account behind it."""
        line = super().formatMessage(record).translate(_VISIBLE)
        fields = {**(_request.get() or {}), **getattr(record, "fields", {})}
        return f"{line} [{' '.join(f'{name}={value}' for name, value in fields.items())}]" if fields else line


class JsonLines(logging.Formatter):
    """An object on each line, for programs."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        message = record.getMessage()
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if job := _JOB.search(message):
            line["job_id"] = job[1]
            if job[2]:
                line["attempt"] = int(job[2])
        line |= _request.get() or {}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
