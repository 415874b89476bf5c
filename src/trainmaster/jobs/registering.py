"""Registering checkpoints of a job class: pointers that are set, and a server that is told, once they are committed."""

from __future__ import annotations

import threading
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from trainmaster.jobs import report
from trainmaster.jobs.checkpoint import Manifest
from trainmaster.jobs.locking import Lock
from trainmaster.jobs.roots import Root
from trainmaster.protocol.identity import POINTERS

_, BEST = POINTERS


class _Saved(NamedTuple):
    place: str
    manifest: Manifest
    took_s: float


class Registrar:
    """Stands between a job's saver and the reporter of this process, and sees every commit. For process 0."""

    def __init__(self, root: Root, home: str) -> None:
        """Take where checkpoints lie, and the directory below it that has the pointers."""
        self._root = root
        self._home = home
        self._mutex = threading.Lock()
        self._under_way: str | None = None
        self._wanted: set[str] = set()
        self._saved: dict[str, _Saved] = {}
        self._told: set[str] = set()
        self.lock: Lock | None = None
        """On the run's identity, where somebody holds one: no commit without it."""

    def expect(self, place: str) -> None:
        """A save to this place begins now; none other is under way."""
        with self._mutex:
            self._under_way, self._wanted = place, set()

    def register(self, place: str, pointers: Collection[str]) -> None:
        """Have pointers lead to a checkpoint: now, or when the save that is under way there is committed.

        Raises:
            FileNotFoundError: nothing is committed there, and nothing is about to be.
            OSError: a pointer could not be set, or the server could not be told.
        """
        with self._mutex:
            if place == self._under_way:
                self._wanted |= set(pointers)
            else:
                self._register(self.place_of(place), pointers)

    def place_of(self, place: str) -> str:
        """Where what this process saved to a place lies: beside it, when the place was taken already."""
        saved = self._saved.get(place)
        return saved.place if saved is not None else place

    # What the saver asks of a reporter.

    def require_ownership(self) -> None:
        """Return when this process may commit: neither its job nor the run's lock went to somebody else."""
        if self.lock is not None:
            self.lock.require()
        report.reporter.require_ownership()

    def committed(self, manifest: Manifest, where: str, *, took_s: float) -> None:
        """Set the pointers that waited for this commit.

        The server is told of what is registered, and of nothing else: it is what a new attempt goes on from.
        """
        with self._mutex:
            place = where.removeprefix(f"{self._root.uri}/")
            self._saved[self._under_way or place] = _Saved(place, manifest, took_s)
            self._under_way = None
            if self._wanted:
                self._register(place, self._wanted)

    def new_manifest(self, **facts: Any) -> Manifest:
        """As the reporter makes it."""
        return report.reporter.new_manifest(**facts)

    def saving(self) -> AbstractContextManager[None]:
        """As the reporter shows it."""
        return report.reporter.saving()

    def note(self, message: str) -> None:
        """As the reporter leaves it."""
        report.note(message)

    def job_id(self) -> str | None:
        """As the reporter knows it."""
        return report.job_id()

    def _register(self, place: str, pointers: Collection[str]) -> None:
        if self._root.manifest(place) is None:
            raise FileNotFoundError(f"{self._root.locate(place)}: no checkpoint is committed there")
        for name in pointers:
            self._root.point(self._home, name, place.removeprefix(f"{self._home}/"))
        saved = next((saved for saved in self._saved.values() if saved.place == place), None)
        if saved is not None and place not in self._told:
            self._told.add(place)
            report.reporter.committed(
                saved.manifest, self._root.locate(place), took_s=saved.took_s, is_best=BEST in pointers
            )
