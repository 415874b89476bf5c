"""The half of a save that training does not wait for: small files, the other ranks' parts, the commit, what follows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from trainmaster.jobs import rng, trees
from trainmaster.jobs.checkpoint import Manifest
from trainmaster.jobs.keeping import to_remove
from trainmaster.jobs.parts import Parts
from trainmaster.jobs.process import Process
from trainmaster.jobs.reporter import Reporter
from trainmaster.jobs.roots import Root
from trainmaster.jobs.trees.writing import write_text

LATEST, BEST = "latest", "best"
"""Pointers in the home of a job."""


class Saved(NamedTuple):
    """A checkpoint that was committed."""

    rel_path: str
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A checkpoint that is being written."""

    root: Root
    home: str
    reporter: Reporter
    process: Process
    rel_path: str
    rename: bool
    draft: Path
    manifest: Manifest
    texts: Mapping[str, str]
    """Small files of process 0."""
    state: rng.State
    point: Sequence[str]
    keep: int | None
    began: float

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
        saved = self._commit(digests)
        for name in self.point:
            self.root.point(self.home, name, saved.rel_path.removeprefix(f"{self.home}/"))
        where = self.root.locate(saved.rel_path)
        self.reporter.committed(saved.manifest, where, took_s=time.monotonic() - self.began)
        self._prune()
        return saved

    def _commit(self, digests: Mapping[str, str]) -> Saved:
        check_owner = self.reporter.require_ownership
        for rel_path in self._names():
            try:
                manifest = self.root.commit(
                    self.draft, rel_path, self.manifest, check_owner=check_owner, known_digests=digests
                )
                return Saved(rel_path, manifest)
            except FileExistsError:
                if not self.rename:
                    raise
        raise AssertionError("names never end")

    def _names(self) -> Iterator[str]:
        yield self.rel_path
        yield f"{self.rel_path}-attempt-{self.manifest.attempt}"
        for number in itertools.count(2):
            yield f"{self.rel_path}-attempt-{self.manifest.attempt}-{number}"

    def _prune(self) -> None:
        if not self.keep:
            return
        targets = [self.root.pointer(self.home, name) for name in (LATEST, BEST)]
        latest, best = (f"{self.home}/{target}".lstrip("/") if target else None for target in targets)
        checkpoints = self.root.committed(self.home)
        # What `latest` says is what a resume begins with; while that is not the newest, it is still in use.
        in_use = [] if latest is None or latest == checkpoints[-1] else [latest]
        for rel_path in to_remove(checkpoints, limit=self.keep, best=best, in_flight=in_use):
            try:
                self.root.remove(rel_path)
            except OSError as error:
                self.reporter.note(f"the old checkpoint {rel_path} could not be removed: {error}")
