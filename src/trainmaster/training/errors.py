"""What can go wrong between a job's document and its data.

    PreparingError
    ├── InputError               what the job names is wrong; the same again would end the same way
    │   └── RowError             one row of a source is wrong
    ├── CredentialsError         a source refuses the credentials, or wants some
    └── UnavailableError         a source does not answer; another try may well succeed

Each has the reason that a preparing step gives for its end.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.protocol.reasons import Reason


class PreparingError(Exception):
    """Something that the job needs could not be made ready; the message says what, why and what to do."""

    reason = Reason.BAD_INPUT


class InputError(PreparingError):
    """What the job names is wrong."""


class CredentialsError(PreparingError):
    """A source refuses the credentials, or wants some."""

    reason = Reason.CREDENTIALS_REFUSED


class UnavailableError(PreparingError):
    """A source does not answer now."""

    reason = Reason.STORAGE_UNAVAILABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a row comes from."""

    source: str
    """The source's path as the job names it."""
    file: str
    """The file's name, without directories."""
    number: int
    """Counted from 1."""
    unit: str = "row"
    """What is counted: row, or line."""

    def __str__(self) -> str:
        inside = "" if self.source.rpartition("/")[2] == self.file else f" (file {self.file})"
        return f"{self.source}{inside}, {self.unit} {self.number}"


class RowError(InputError):
    """One row of a source is wrong."""

    def __init__(self, origin: Origin, problem: str, column: str | None = None) -> None:
        super().__init__(origin, problem, column)  # all of it, so that it survives the way out of another process
        self.origin = origin
        self.problem = problem
        self.column = column

    def __str__(self) -> str:
        column = f", column '{self.column}'" if self.column else ""
        return f"{self.origin}{column}: {self.problem}"
