"""The half of a save that training does not wait for.

Small files, the other ranks' parts, the commit; then pointers, old checkpoints that are removed, and what the server
is told.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainmaster.jobs import report, rng, trees
from trainmaster.jobs.checkpoint import Manifest
from trainmaster.jobs.checkpoint_reader import BEST, LATEST, find
from trainmaster.jobs.lock import Lock
from trainmaster.jobs.process import Process
from trainmaster.jobs.roots import Root, commit_beside
from trainmaster.jobs.trees.writer import write_text


def to_remove(
    checkpoints: Sequence[str],
    *,
    limit: int | None,
    best: str | None = None,
    pinned: Collection[str] = (),
    in_flight: Collection[str] = (),
) -> list[str]:
    """The checkpoints to remove: the oldest beyond `limit`, and none that somebody may still need.

    Args:
        checkpoints: those that are committed, the oldest first.
        limit: how many to keep beside those below; None or 0 for all.
        best: never goes, and does not count unless it is the newest.
        pinned: likewise.
        in_flight: likewise; being written or read right now.

    Returns:
        What to remove, the oldest first. The newest always stays: it is what a resume goes on from. So does the one
        before it while a save is in flight, since that may fail and the newest may turn out to be corrupt.
    """
    if not limit or limit < 0:
        return []
    apart = {*pinned, *in_flight, *({best} - {*checkpoints[-1:]})}
    counted = [name for name in checkpoints if name not in apart]
    needed = {*checkpoints[-1:], *(checkpoints[-2:] if in_flight else ())}
    return [name for name in counted[: max(0, len(counted) - limit)] if name not in needed]


_PART = ".part-"
_LOOK_EVERY_S = 0.05


class Saved(NamedTuple):
    """A checkpoint that was committed."""

    rel_path: str
    manifest: Manifest
    took_s: float
    """From the call that saved it to its commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A checkpoint that is being written."""

    root: Root
    home: str
    process: Process
    rel_path: str
    draft: Path
    manifest: Manifest
    texts: Mapping[str, str]
    """Small files of process 0."""
    state: rng.State
    point: Sequence[str]
    keep: int | None
    began: float
    check_owner: Callable[[], None]
    on_commit: Callable[[Saved], None]
    note: Callable[[str], None]

    def finish(self, writing: trees.Writing, parts: Parts) -> Saved | None:
        """Wait for everything and commit it; None on all ranks but the first, which does."""
        try:
            digests = writing.result()
            digests |= rng.write(self.state, self.draft, self.process.index)
            if self.process.index != 0:
                parts.done(digests)
                return None
        except BaseException as error:
            parts.failed(error)
            raise
        digests |= dict(write_text(self.draft, name, text) for name, text in self.texts.items())
        digests |= parts.collect(self.rel_path)
        place, manifest = commit_beside(
            self.root, self.draft, self.rel_path, self.manifest, check_owner=self.check_owner, known_digests=digests
        )
        saved = Saved(place, manifest, time.monotonic() - self.began)
        for name in self.point:
            self.root.point(self.home, name, place.removeprefix(f"{self.home}/"))
        self.on_commit(saved)
        self._prune()
        return saved

    def _prune(self) -> None:
        if not self.keep:
            return
        targets = [self.root.pointer(self.home, name) for name in (LATEST, BEST)]
        latest, best = (f"{self.home}/{target}".lstrip("/") if target else None for target in targets)
        checkpoints = self.root.committed(self.home)
        # What `latest` says is what a resume begins with; while that is not the newest, it is still in use.
        in_use = [] if latest is None or latest in checkpoints[-1:] else [latest]
        for rel_path in to_remove(checkpoints, limit=self.keep, best=best, in_flight=in_use):
            try:
                self.root.remove(rel_path)
            except OSError as error:
                self.note(f"the old checkpoint {rel_path} could not be removed: {error}")


class PartError(RuntimeError):
    """A rank could not write its part of a checkpoint, or did not in time."""


class Parts:
    """How ranks tell rank 0 that their part of a checkpoint is written: by small files in the draft.

    The threads that save have no collective operations: those belong to the thread that trains.
    """

    def __init__(self, draft: Path, process: Process, *, timeout_s: float) -> None:
        self._draft = draft
        self._process = process
        self._timeout_s = timeout_s

    def done(self, digests: Mapping[str, str]) -> None:
        """Say that this rank's files are on disk."""
        self._say({"digests": dict(digests)})

    def failed(self, error: BaseException) -> None:
        """Say that they will not be; rank 0 need not wait."""
        if self._process.index == 0:
            return
        with contextlib.suppress(OSError):  # The draft is gone: rank 0 has given up by itself.
            self._say({"error": f"{type(error).__name__}: {error}"})

    def collect(self, rel_path: str) -> dict[str, str]:
        """On rank 0: wait for all other ranks; the digests of their files.

        Raises:
            PartError: names the rank that failed or did not come in time.
        """
        digests: dict[str, str] = {}
        deadline = time.monotonic() + self._timeout_s
        for rank in range(1, self._process.count):
            said = self._await(rank, deadline, rel_path)
            if "error" in said:
                raise PartError(f"rank {rank} could not write its part of {rel_path}: {said['error']}")
            digests |= said["digests"]
        return digests

    def _await(self, rank: int, deadline: float, rel_path: str) -> dict[str, Any]:
        path = self._draft / f"{_PART}{rank}"
        while True:
            try:
                said: dict[str, Any] = json.loads(path.read_bytes())
                path.unlink()
                return said
            except FileNotFoundError:
                if time.monotonic() > deadline:
                    raise PartError(
                        f"rank {rank} did not write its part of {rel_path} within {self._timeout_s:.0f} s"
                    ) from None
                time.sleep(_LOOK_EVERY_S)

    def _say(self, what: Mapping[str, Any]) -> None:
        path = self._draft / f"{_PART}{self._process.index}"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(what))
        os.replace(new, path)


class Registrar:
    """Registers checkpoints of a job class once they are committed: sets pointers to them and tells the server.

    It sees every commit of the job's saver. For process 0.
    """

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
