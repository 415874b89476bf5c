"""Every error that Trainmaster raises on purpose. A `SpecError` is about a wrong shape or value; a `RefusedError` about
a well-formed request that we will not do; a `NotFoundError` about what does not exist or is not the caller's to see.

The default message is the first problem, or else the first line of the class's docstring. Clients branch on `code`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with a request, and where."""

    field: str
    message: str


class TrainmasterError(Exception):
    """Something went wrong."""

    code = "INTERNAL"

    def __init__(self, message: str | None = None, problems: Sequence[Problem] = ()) -> None:
        default = (type(self).__doc__ or "").splitlines()[0]
        if problems:
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            default = f"{problems[0].field}: {problems[0].message}{more}"
        super().__init__(message or default)
        self.problems = tuple(problems)
        """The fields that are to blame, if any."""

    @property
    def message(self) -> str:
        return str(self.args[0])


class SpecError(TrainmasterError):
    """The request is not valid."""

    code = "VALIDATION_ERROR"

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems=problems)


class RefusedError(TrainmasterError):
    """The request is refused."""

    code = "INVALID_ARGUMENT"

    @classmethod
    def because(cls, problems: Sequence[Problem]) -> Self:
        return cls(problems=problems)


class ForbiddenError(TrainmasterError):
    """This server does not allow that."""

    code = "FORBIDDEN"


class NotFoundError(TrainmasterError):
    """Not found."""

    code = "NOT_FOUND"


class JobNotFoundError(NotFoundError):
    """There is no such job."""

    code = "JOB_NOT_FOUND"


class ConflictError(TrainmasterError):
    """The request conflicts with the current state."""

    code = "CONFLICT"


class InvalidTransitionError(ConflictError):
    """The job's state does not allow that."""

    code = "INVALID_STATE_TRANSITION"

    def __init__(self, *, action: str, status: str, allowed_from: Sequence[str], message: str | None = None) -> None:
        super().__init__(message or f"cannot {action} a job that is {status}; possible from {', '.join(allowed_from)}")
        self.action = action
        self.status = status
        self.allowed_from = tuple(allowed_from)


class HandleTakenError(ConflictError):
    """Another job of this account has that handle."""

    code = "HANDLE_TAKEN"


class IdempotencyMismatchError(ConflictError):
    """This Idempotency-Key was used before, with a different request."""

    code = "IDEMPOTENCY_KEY_REUSED"


class StaleWriteError(ConflictError):
    """The job was changed by somebody else in the meantime; try again."""

    code = "STALE_WRITE"


class DoubleBookedError(ConflictError):
    """Another attempt holds these resources."""

    code = "DOUBLE_BOOKED"


class NotLeaderError(TrainmasterError):
    """This server is not the leader."""

    code = "NOT_LEADER"


class StoreUnavailableError(TrainmasterError):
    """The database cannot be used now; try again."""

    code = "UNAVAILABLE"


class EngineUnavailableError(TrainmasterError):
    """The engine of the cluster does not answer; try again."""

    code = "ENGINE_UNAVAILABLE"


class NewerVersionError(TrainmasterError):
    """This was written by a newer version of Trainmaster; upgrade this one."""

    code = "NEWER_VERSION"


class NewerSpecError(NewerVersionError):
    """This job was stored by a newer version of Trainmaster; upgrade this server."""


class NewerDatabaseError(NewerVersionError):
    """This database belongs to a newer version of Trainmaster; upgrade this server."""


LONGEST_ECHO = 64
"""Errors repeat unknown names up to this length."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like `name`, whatever its case; None when none is near.

    >>> nearest("gpu_cont", ["gpu_count", "gpu_type"]), nearest("sft", ["SFT", "DPO"]), nearest("x", ["gpu_count"])
    ('gpu_count', 'SFT', None)
    """
    if len(name) > LONGEST_ECHO:
        return None  # no name is that long, and to compare it would take long
    folded = {candidate.casefold(): candidate for candidate in known}
    found = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def choice_message(noun: str, name: str, known: Iterable[str]) -> str:
    """The message about an unknown name, with the known ones.

    >>> choice_message("kind", "comand", ["command", "script"])
    "unknown kind 'comand'; did you mean 'command'? Choices: command, script"
    """
    choices = tuple(known)
    near = nearest(name, choices)
    hint = f"did you mean '{near}'? Choices" if near else "choices"
    return f"unknown {noun} '{shown(name)}'; {hint}: {', '.join(choices)}"


def shown(name: str) -> str:
    """A name from a request, shortened and made valid Unicode, for an error message."""
    short = name if len(name) <= LONGEST_ECHO else name[:LONGEST_ECHO] + "…"
    return short.encode("utf-8", "backslashreplace").decode()
