"""What goes wrong in the engine. Without NumPy: the server reads what a model is before it starts a trainer."""

from __future__ import annotations

from enum import StrEnum


class Blame(StrEnum):
    """Whose fault an error is."""

    USER = "user"
    SERVER = "server"


class EngineError(Exception):
    """A request cannot be done; the message says why and what to do instead."""

    def __init__(self, message: str, blame: Blame = Blame.USER) -> None:
        super().__init__(message)
        self.blame = blame
