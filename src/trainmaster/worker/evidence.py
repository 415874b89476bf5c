"""What a failed process left behind: its last lines, and the end of its traceback. Pure but for `read_tail`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

MAX_LINES = 20
MAX_LINE_CHARACTERS = 500
MAX_ERROR_CHARACTERS = 200
"""Of an error's line where it is quoted; the last lines hold it whole."""
TAIL_BYTES = 64 << 10

# What launchers and exception groups put in front of a traceback's lines.
_LINE_PREFIX = re.compile(r"^(?:\[rank\d+\]:\s?)?(?:\s*[|+] ?)?")
_HEADER = re.compile(r"Traceback \(most recent call last\):$")
_FRAME = re.compile(r'^\s*(File "[^"]*", line \d+(?:, in .+)?)$')
# What Python's fault handler prints when the process crashes; the innermost frame comes first.
_CRASH = re.compile(r"^Fatal Python error: (.+)$")
_CRASH_FRAME = re.compile(r'^\s*(File "[^"]*", line \d+) in (.+)$')
# A syntax error of the script itself is printed without a header.
_HEADLESS_ERROR = re.compile(r"^(?:SyntaxError|IndentationError|TabError)(?::|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The end of a process's output, for people and for the verdict."""

    last_lines: tuple[str, ...] = ()
    frame: str | None = None
    """Where a Python process failed, with its error: `File "x.py", line 3, in f: ValueError: bad`."""
    error: str | None = None
    """The error line of its last traceback."""


def evidence_from(err: bytes, out: bytes) -> Evidence:
    """The evidence in the ends of a process's two outputs.

    The last lines end with those that matter most: a traceback, else the error output.
    """
    first, second = _lines(err), _lines(out)
    frame, error = _last_traceback(first)
    if frame is None:
        frame, error = _last_traceback(second)
        if frame is not None:
            first, second = second, first
    last_lines = first[-MAX_LINES:]
    if room := MAX_LINES - len(last_lines):
        last_lines = second[-room:] + last_lines
    if error and len(error) > MAX_ERROR_CHARACTERS:
        error = f"{error[:MAX_ERROR_CHARACTERS]}…"
    return Evidence(
        last_lines=tuple(line[:MAX_LINE_CHARACTERS] for line in last_lines),
        frame=f"{frame}: {error}" if frame and error else frame,
        error=error,
    )


def read_tail(path: str) -> bytes:
    """The end of a file; nothing when it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES)
    except OSError:
        return b""


def _lines(data: bytes) -> list[str]:
    """The lines that are not blank, each as a terminal would show it at last: progress bars overwrite themselves."""
    shown = (line.rstrip().rpartition("\r")[2] for line in data.decode(errors="replace").split("\n"))
    return [line for line in shown if line.strip()]


def _last_traceback(lines: list[str]) -> tuple[str | None, str | None]:
    """The innermost frame and the error line of the last traceback."""
    bare = [_LINE_PREFIX.sub("", line) for line in lines]
    crash = next((n for n in reversed(range(len(bare))) if _CRASH.match(bare[n])), None)
    start = next((n for n in reversed(range(len(bare))) if _HEADER.search(bare[n])), None)
    if crash is not None and (start is None or crash > start):
        return _crash(bare[crash:])
    if start is None:
        end = next((n for n in reversed(range(len(bare))) if _HEADLESS_ERROR.match(bare[n])), None)
        # The file, the line, its text and a marker come before the error.
        start = None if end is None else max(0, end - 4)
    if start is None:
        return None, None
    frame = None
    for line in bare[start:]:
        if match := _FRAME.match(line):
            frame = match[1]
        elif frame and not line[0].isspace():
            return frame, line
    return frame, None


def _crash(lines: list[str]) -> tuple[str | None, str]:
    """The innermost frame of a process that crashed, and of what it did."""
    # Other threads may be listed before the one that crashed.
    thread = next((n for n, line in enumerate(lines) if line.startswith("Current thread")), 0)
    frame = next((match for line in lines[thread:] if (match := _CRASH_FRAME.match(line))), None)
    return (f"{frame[1]}, in {frame[2]}" if frame else None), lines[0]
