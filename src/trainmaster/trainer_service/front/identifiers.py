"""The ids that clients are given. Those of futures and sampling sessions say which start of which job they are of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

MAX_COUNT = 2**63 - 1
"""Copies of a sampling client count from a random multiple of 10^9 on, up to 10^18."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of one job; ids of another one are dead here."""

    job_id: str
    number: int

    def future_id(self, owner: str, part: str | int) -> str:
        """Of what `owner`, a model or a sampling session, was asked; `part` says which time."""
        return f"{self.job_id}:{self.number}:{owner}:{part}"

    def sampling_session_id(self, session_id: str, number: int) -> str:
        """Of the sampling session that a session counts as `number`."""
        return f"{session_id}:sample:{number}@{self.job_id}.{self.number}"

    def made(self, future_id: str) -> bool:
        """Whether the id of a future is of this attempt."""
        return future_id.startswith(f"{self.job_id}:{self.number}:")

    def opened(self, sampling_session_id: str) -> bool:
        """Whether the id of a sampling session is of this attempt."""
        return sampling_session_id.endswith(f"@{self.job_id}.{self.number}")


def model_id_of(session_id: str, number: int) -> str:
    """Of the model that a session counts as `number`."""
    return f"{session_id}:train:{number}"


def is_model_id(text: str) -> bool:
    """Whether something can be the id of a model."""
    return ":train:" in text


def owner_of(future_id: str) -> str:
    """The model or the sampling session that a future's id names; empty when it is no such id."""
    parts = future_id.split(":", 2)
    if len(parts) != 3 or not parts[1].isdigit():
        return ""
    return parts[2].rpartition(":")[0]


def is_count(value: object) -> TypeGuard[int]:
    """Whether something that a client sent can be a number in a sequence."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT
