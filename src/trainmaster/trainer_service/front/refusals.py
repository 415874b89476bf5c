"""Why a request is not done: for good, for now, or because nothing is done any more."""

from __future__ import annotations


class RefusedError(Exception):
    """It cannot be done: told through a future where there is one, and with a status of 400 elsewhere."""

    def __init__(self, error: str, category: str = "user") -> None:
        super().__init__(error)
        self.category = category


class BusyError(Exception):
    """It cannot be taken in now: its client hears a status of 429, and comes back.

    The public ones do so for as long as it takes with a sample, and for five minutes with anything else.
    """


class StoppedError(Exception):
    """The trainer has stopped, and the front is about to go."""
