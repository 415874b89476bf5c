"""Exit codes, and how an error is told: one line that says what is wrong and what to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

from trainmaster.sdk.errors import (
    ApiError,
    LocalServerError,
    NotFoundError,
    SdkError,
    UnauthorizedError,
    UnreachableError,
)

DEBUG_VARIABLE = "TRAINMASTER_DEBUG"


class ExitCode(IntEnum):
    """What scripts can rely on."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3
    FAILED = 4
    CANCELLED = 5
    PREEMPTED = 6
    PAUSED = 7
    DETACHED = 130


EXIT_OF_STATUS: Mapping[str, ExitCode] = MappingProxyType(
    {
        "COMPLETED": ExitCode.OK,
        "FAILED": ExitCode.FAILED,
        "CANCELLED": ExitCode.CANCELLED,
        "PREEMPTED": ExitCode.PREEMPTED,
        "PAUSED": ExitCode.PAUSED,
    }
)
"""How `--follow` ends, by the job's last status."""

EPILOG = """
Exit codes: 0 ok; 1 the request was refused; 2 wrong usage; 3 no server answers. With submit --follow, by how the job
ended: 0 COMPLETED, 4 FAILED, 5 CANCELLED, 6 PREEMPTED, 7 PAUSED. 130 after Ctrl-C.

TRAINMASTER_URL and TRAINMASTER_API_KEY name a server. Without them the commands use the local one, whose state is in
TRAINMASTER_HOME (~/.trainmaster), and start it when it does not run.
"""


def say(message: str) -> None:
    """Tell a person something that is not the command's result."""
    sys.stderr.write(message + "\n")


class CommandError(Exception):
    """A command cannot do what it was asked; the message says why."""


class UsageError(CommandError):
    """What was typed, or the file that it names, makes no sense."""


def report(error: SdkError | CommandError) -> ExitCode:
    """Tell what went wrong; returns the exit code that belongs to it."""
    match error:
        case UnreachableError():
            say(f"error: {error}; {_where_to_look()}")
            return ExitCode.UNREACHABLE
        case LocalServerError():
            say(f"error: {error}")
            return ExitCode.UNREACHABLE
        case ApiError():
            _say_refusal(error)
        case _:
            say(f"error: {error}")
    return ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.REFUSED


def _say_refusal(error: ApiError) -> None:
    if len(error.problems) > 1:
        say(f"error: {len(error.problems)} things are wrong")
        for problem in error.problems:
            say(f"  {problem.field}: {problem.message}")
    else:
        say(f"error: {error.message}")
    match error:
        case NotFoundError(code="JOB_NOT_FOUND"):
            say("`trainmaster ps -a` lists every job, `trainmaster ps --deleted` those whose files are left.")
        case UnauthorizedError():
            say("Set TRAINMASTER_API_KEY; a server's first key is in the file api-key of its data directory.")
    if error.status >= 500 and error.request_id:
        say(f"The server's log has more about request {error.request_id}.")


def _where_to_look() -> str:
    if os.environ.get("TRAINMASTER_URL"):
        return "check TRAINMASTER_URL, or unset it to use the local server"
    return "start it with `trainmaster up`"
