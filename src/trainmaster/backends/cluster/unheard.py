"""Attempts whose workers run on the engine and do not reach the server: as when it has an address that they lack."""

from __future__ import annotations

import time

from trainmaster.backends.cluster import worker_start

UNHEARD_S = 10.0
"""A worker that the engine has started usually reaches the server sooner."""


class Unheard:
    """By name. Callers see to it that one thread uses it at a time for the same attempt."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        """When an attempt was first seen to run on the engine, without a claim of each node."""

    def is_silent(self, name: str) -> bool:
        """Whether the workers of an attempt that runs should have been heard by now; it is of no use to wait for them
        once they have given up."""
        since = self._since.setdefault(name, time.monotonic())
        return UNHEARD_S <= time.monotonic() - since < worker_start.GIVES_UP_AFTER_S

    def forget(self, name: str) -> None:
        self._since.pop(name, None)
