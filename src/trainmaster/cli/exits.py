"""Exit codes, and errors as one line that says what is wrong and what to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from enum import IntEnum
from typing import Any

from trainmaster.client import errors
from trainmaster.client.server_lookup import KEY_VARIABLE, URL_VARIABLE, configured_url

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


EXIT_OF_STATUS: Mapping[str, ExitCode] = {
    "COMPLETED": ExitCode.OK,
    "FAILED": ExitCode.FAILED,
    "CANCELLED": ExitCode.CANCELLED,
    "PREEMPTED": ExitCode.PREEMPTED,
    "PAUSED": ExitCode.PAUSED,
}
"""How `--follow` ends, by the job's last status."""

EPILOG = """
Exit codes: 0 ok; 1 the request was refused; 2 wrong usage; 3 no server answers. With submit --follow, by how the job
ended: 0 COMPLETED, 4 FAILED, 5 CANCELLED, 6 PREEMPTED, 7 PAUSED. 130 after Ctrl-C.

The server: TRAINMASTER_URL and TRAINMASTER_API_KEY, else the one of `trainmaster login`, else the local one, whose
state is in TRAINMASTER_HOME (~/.trainmaster). A command that needs the local server starts it.

With --json a command that fails writes {"error": {"code", "message", ...}, "exit_code"} to the standard output.
"""


def say(message: str) -> None:
    """Tell a person something that is not the command's result."""
    sys.stderr.write(message + "\n")


class CommandError(Exception):
    """A command cannot do what it was asked; the message says why."""


class UsageError(CommandError):
    """The command line, or a file that it names, is wrong."""


def report(error: errors.ClientError | CommandError) -> ExitCode:
    match error:
        case errors.UnreachableError():
            say(f"error: {error}; {_where_to_look()}")
        case errors.ApiError():
            _say_refusal(error)
        case _:
            say(f"error: {error}")
    return exit_code_of(error)


def exit_code_of(error: errors.ClientError | CommandError) -> ExitCode:
    match error:
        case errors.UnreachableError() | errors.LocalServerError():
            return ExitCode.UNREACHABLE
        case UsageError():
            return ExitCode.USAGE
        case _:
            return ExitCode.REFUSED


def error_document(error: errors.ClientError | CommandError) -> dict[str, Any]:
    """An error as `--json` prints it. The server's errors keep their code; the others have the exit code's name."""
    code = exit_code_of(error)
    described: dict[str, Any] = {"code": code.name, "message": str(error)}
    if isinstance(error, errors.ApiError):
        details = (
            dict(error.details) if isinstance(error.details, Mapping) else [asdict(each) for each in error.problems]
        )
        described |= {"code": error.code, "details": details, "request_id": error.request_id}
    return {"error": described, "exit_code": int(code)}


def _say_refusal(error: errors.ApiError) -> None:
    if len(error.problems) > 1:
        say(f"error: {len(error.problems)} things are wrong")
        for problem in error.problems:
            say(f"  {problem.field}: {problem.message}")
    else:
        say(f"error: {error.message}")
    match error:
        case errors.NotFoundError(code="JOB_NOT_FOUND"):
            say("`trainmaster ps -a` lists every job, `trainmaster ps --deleted` those whose files are left.")
        case errors.ConflictError(details={"action": "retry", "status": "COMPLETED"}):
            say("`trainmaster rerun` runs a completed job again, `trainmaster clone --set ...` a changed copy of it.")
        case errors.UnauthorizedError():
            say(_which_key())
    if error.status >= 500 and error.request_id:
        say(f"The server's log has more about request {error.request_id}.")


def _which_key() -> str:
    if os.environ.get(KEY_VARIABLE):
        local = "" if configured_url() else ", or unset it to use the local server's own key"
        return f"The key comes from {KEY_VARIABLE}: correct it{local}."
    return (
        "Set TRAINMASTER_API_KEY, or run `trainmaster login URL`; a server's first key is in the file api-key of its "
        "data directory."
    )


def _where_to_look() -> str:
    if os.environ.get(URL_VARIABLE):
        return f"check {URL_VARIABLE}, or unset it to use the local server"
    if configured_url():
        return "`trainmaster login` shows which server is used, `trainmaster logout` goes back to the local one"
    return "start it with `trainmaster up`"
