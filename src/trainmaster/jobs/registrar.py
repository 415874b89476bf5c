"""Registers checkpoints of a job class once they are committed: sets pointers to them, and tells the server."""

from __future__ import annotations

import threading
from collections.abc import Collection

from trainmaster.jobs import report
from trainmaster.jobs.checkpoint_lookup import BEST, find
from trainmaster.jobs.commit import Saved
from trainmaster.jobs.lock import Lock
from trainmaster.jobs.roots import Root


class Registrar:
    """Sees every commit of a job's saver, and knows which of them are to be registered. For process 0."""

    def __init__(self, root: Root, home: str) -> None:
        """Take where checkpoints lie, and the directory below it that has the pointers."""
        self._root = root
        self._home = home
        self._mutex = threading.Lock()
        self._under_way: str | None = None
        self._wanted: set[str] = set()
        self._is_best = False
        """Whether the save that is under way becomes the best one, registered or not."""
        self._saved: dict[str, Saved] = {}
        """What this process committed, by its place."""
        self._told: dict[str, bool] = {}
        """What the server knows of, and whether it is the best."""
        self.lock: Lock | None = None
        """On the run's identity, where somebody holds one: no commit without it."""

    def expect(self, path: str | None) -> None:
        """A save to this path begins now, and none other is under way; None: none is at all."""
        with self._mutex:
            self._under_way, self._wanted = path, set()
            self._is_best = path == f"{self._home}/{BEST}"

    def register(self, path: str, pointers: Collection[str]) -> None:
        """Have pointers lead to a checkpoint: now, or when the save that is under way there is committed.

        Raises:
            FileNotFoundError: nothing is committed there, and nothing is about to be.
            OSError: a pointer could not be set, or the server could not be told.
        """
        with self._mutex:
            if path == self._under_way:
                self._wanted |= set(pointers)
            else:
                self._register(find(self._root, path), pointers)

    def check_owner(self) -> None:
        """Return when this process may commit: neither its job nor the run's lock went to somebody else."""
        if self.lock is not None:
            self.lock.require()
        report.reporter.require_ownership()

    def on_commit(self, saved: Saved) -> None:
        """Set the pointers that waited for this commit.

        The server is told of what is registered, and of nothing else: it is what a new attempt goes on from.
        """
        with self._mutex:
            self._saved[saved.rel_path] = saved
            self._under_way = None
            if self._wanted:
                self._register(saved.rel_path, self._wanted | ({BEST} if self._is_best else set()))
            elif self._is_best:
                self._point(saved.rel_path, BEST)

    def _register(self, place: str, pointers: Collection[str]) -> None:
        for name in pointers:
            self._point(place, name)
        self._tell(place, is_best=BEST in pointers)

    def _point(self, place: str, pointer: str) -> None:
        self._root.point(self._home, pointer, place.removeprefix(f"{self._home}/"))

    def _tell(self, place: str, *, is_best: bool) -> None:
        saved = self._saved.get(place)
        if saved is not None and self._told.get(place) not in (True, is_best):
            self._told[place] = is_best
            report.reporter.committed(saved.manifest, self._root.locate(place), took_s=saved.took_s, is_best=is_best)
