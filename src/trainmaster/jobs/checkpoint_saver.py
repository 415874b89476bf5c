"""Saves checkpoints while training continues.

`Saver.save` returns when the tree was copied. A thread writes the copy, waits for the parts of other ranks, commits and
reports the checkpoint to the server. One save is under way at a time: the next one waits for it, and raises its error.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from trainmaster.jobs import report, rng, trees
from trainmaster.jobs.attempt import NotOwnerError
from trainmaster.jobs.checkpoint import DRAFT_PREFIX, Manifest, check_path
from trainmaster.jobs.checkpoint_reader import BEST, LATEST, METADATA, Loader
from trainmaster.jobs.parts import Parts
from trainmaster.jobs.process import Process, SingleProcess, call_on_first
from trainmaster.jobs.report import Reporter
from trainmaster.jobs.roots import Root, commit_beside
from trainmaster.jobs.trees.writer import TREE, write_text

TIMEOUT_S = 1800.0
"""How long rank 0 waits for the parts of the other ranks."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED = frozenset({METADATA, TREE, "manifest.json"})


_savers: weakref.WeakSet[Saver] = weakref.WeakSet()
"""All savers of this process, for code that reads checkpoints without one."""


def finish_saves() -> None:
    """Wait until no saver of this process writes. Not collective; `Saver.wait` raises the errors."""
    for saver in list(_savers):
        saver.join()


class SaveError(RuntimeError):
    """A checkpoint was not saved."""


class SavedCheckpoint(NamedTuple):
    rel_path: str
    manifest: Manifest
    took_s: float


class Saver(Loader):
    """Saves and loads checkpoints of one job below one root; for one thread at a time.

    With several processes, `save`, `wait` and the loads are collective: all call them, in the same order. End it with
    `close` or a `with` block: a save that is under way when the interpreter ends is lost.
    """

    def __init__(
        self,
        root: Root,
        process: Process | None = None,
        *,
        home: str = "",
        keep: int | None = None,
        reporter: Reporter | None = None,
        check_owner: Callable[[], None] | None = None,
        on_commit: Callable[[SavedCheckpoint], None] | None = None,
        staging_bytes: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Prepare to save; nothing is written yet.

        Args:
            process: this process among those that train together; by default it is alone.
            home: this job's directory below the root, which has its pointers, and in which `keep` counts.
            keep: how many checkpoints to keep; None for all. Where a server manages the root, it prunes instead.
            check_owner: called on process 0 right before a commit, which it prevents by raising; by default, the
                reporter's.
            on_commit: called on process 0 after every commit; by default, the commit is reported to the server.
            staging_bytes: the most host memory that copies may take; a larger tree is copied in several steps.
        """
        super().__init__(
            root,
            process if process is not None else SingleProcess(),
            home=check_path(home, empty=True),
            buffers=trees.Buffers(staging_bytes),
            reporter=reporter if reporter is not None else report.reporter,
        )
        self._keep = keep
        self._check_owner = check_owner if check_owner is not None else self._reporter.require_ownership
        self._on_commit = on_commit
        self._prunes = self._reporter.job_id() is None or not root.is_retained
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._pending = False
        self._problem: BaseException | None = None
        self._saved: SavedCheckpoint | None = None
        _savers.add(self)

    def prepare(self, tree: Any) -> None:
        """Allocate the memory for copies of this tree in the background, so that the first save need not wait."""
        if not self._pending:
            plan = trees.plan(tree, process=self._process)
            self._run(lambda: plan.allocate(self._buffers))

    def save(
        self,
        tree: Any,
        *,
        rel_path: str,
        step: int,
        epoch: float | None = None,
        metrics: Mapping[str, float] | None = None,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, str] | None = None,
        point: Sequence[str] = (),
        kind: str = "",
        name: str = "",
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """Start to save; when this returns, the tree may be changed again.

        Raises the error of the previous save if that failed; then this one did not start.

        Args:
            tree: what to save. Whole arrays and plain values are those of process 0.
            rel_path: the path below the root. A second save to the same path is committed beside the first, under
                another name; see `SavedCheckpoint.rel_path`.
            step, epoch: what training has reached.
            metadata: any JSON object, such as the position in the data.
            files: the contents of further files, by name.
            point: pointers in `home` to set to it after the commit, such as `latest`.
        """
        self.wait()
        began = time.monotonic()
        rel_path = check_path(rel_path)
        plan = trees.plan(tree, process=self._process)
        for file in files or {}:
            if not _FILE_NAME.fullmatch(file) or file in _RESERVED:
                raise ValueError(f"{file!r} cannot be the name of a file in a checkpoint")
        texts = {METADATA: json.dumps(dict(metadata or {}), indent=1), **(files or {})}
        manifest = replace(
            self._reporter.new_manifest(step=step, epoch=epoch, metrics=metrics),
            world_size=self._process.count,
            kind=kind,
            framework=plan.framework,
            name=name,
            attributes=dict(attributes or {}),
        )
        with contextlib.ExitStack() as scope:
            parts = self._parts(scope, rel_path, manifest, plan)
            state = rng.capture()
            try:
                draft = scope.enter_context(parts.own_draft(job_id=manifest.job_id, attempt=manifest.attempt))
                writing = plan.start(draft, self._buffers)
            except BaseException as error:
                parts.failed(error)
                if self._process.count > 1:
                    # The other ranks will ask for its outcome.
                    self._pending, self._problem = True, error
                raise
            open_draft = scope.pop_all()

        def finish() -> None:
            with open_draft:
                try:
                    digests = writing.result()
                    digests |= rng.write(state, draft, self._process.index)
                    if self._process.index != 0:
                        parts.done(digests, draft)
                        return
                except BaseException as error:
                    parts.failed(error)
                    raise
                digests |= dict(write_text(draft, name, text) for name, text in texts.items())
                collected = parts.collect(rel_path)
                place, committed = commit_beside(
                    self._root,
                    draft,
                    rel_path,
                    manifest,
                    check_owner=self._check_owner,
                    known_digests=digests | collected.digests,
                    parts=collected.delivered,
                )
                saved = SavedCheckpoint(place, committed, time.monotonic() - began)
                for name in point:
                    self._root.point(self._home, name, place.removeprefix(f"{self._home}/"))
                if self._on_commit is not None:
                    self._on_commit(saved)
                else:
                    self._reporter.committed(committed, self._root.locate(place), took_s=saved.took_s)
                self._prune()
                self._saved = saved

        self._run(finish)

    @property
    def busy(self) -> bool:
        """Whether a save is under way in this process. Ranks may differ."""
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        """Wait until nothing is under way in this process. Not collective; raises nothing."""
        if (thread := self._thread) is not None and thread is not threading.current_thread():
            thread.join()

    def wait(self) -> SavedCheckpoint | None:
        """Wait until nothing is under way; returns what was saved since the last wait, if anything, or raises."""
        if not self._pending:
            return None
        if self._thread is not None:
            self._thread.join()
        self._thread, self._pending = None, False
        problem, self._problem = self._problem, None
        saved, self._saved = self._saved, None

        def outcome() -> dict[str, Any] | None:
            if problem is not None:
                raise problem
            return None if saved is None else {**saved._asdict(), "manifest": json.loads(saved.manifest.to_bytes())}

        if self._process.count > 1:
            errors = (NotOwnerError,)
            found = call_on_first(self._process, "save a checkpoint", outcome, errors=errors, otherwise=SaveError)
            if found is not None:
                saved = SavedCheckpoint(**{**found, "manifest": Manifest.from_json(found["manifest"])})
        # On another rank, an error of rank 0 was raised above: this rank's own is part of that, or follows from it.
        if problem is not None:
            raise problem
        return saved

    def settle(self) -> None:
        self.wait()

    def close(self) -> None:
        """Wait for a save that is under way, and free the memory for copies; raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._buffers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # `wait` raises it
                self._problem = error

        self._thread, self._pending = threading.Thread(target=run, name="checkpoint"), True
        self._thread.start()

    def _prune(self) -> None:
        if not self._keep or not self._prunes:
            return
        targets = [self._root.pointer(self._home, name) for name in (LATEST, BEST)]
        latest, best = (f"{self._home}/{target}".lstrip("/") if target else None for target in targets)
        checkpoints = self._root.committed(self._home)
        # A resume starts from `latest`; while that is not the newest, it is still in use.
        in_use = [] if latest is None or latest in checkpoints[-1:] else [latest]
        for rel_path in to_remove(checkpoints, limit=self._keep, best=best, in_flight=in_use):
            try:
                self._root.remove(rel_path)
            except OSError as error:
                self._reporter.note(f"the old checkpoint {rel_path} could not be removed: {error}")

    def _parts(self, scope: contextlib.ExitStack, rel_path: str, manifest: Manifest, plan: trees.TreePlan) -> Parts:
        """Make the directory that all ranks write to, on process 0; those that do not see it deliver their parts."""

        def make() -> str:
            made = self._root.draft(
                rel_path, job_id=manifest.job_id, attempt=manifest.attempt, expected_bytes=plan.nbytes
            )
            directory = scope.enter_context(made)
            scope.enter_context(self._reporter.saving())
            return str(directory)

        process = self._process
        draft = Path(call_on_first(process, f"save {rel_path}", make, otherwise=SaveError))
        parts = Parts(draft=draft, process=process, timeout_s=self._timeout_s)
        is_away = not draft.is_dir()
        if not process.any(is_away):
            return parts
        delivery = self._root.delivery(rel_path, draft.name.removeprefix(DRAFT_PREFIX))
        if delivery is None or plan.needs_shared_directory:
            what = "arrays of JAX" if delivery is not None else "checkpoints in a directory"
            raise SaveError(
                f"not every rank sees {draft}, which rank 0 made: on several machines, {what} need a directory that "
                "they share"
            )
        answers = process.gather(b"away" if is_away else b"here")
        away = {rank for rank, answer in enumerate(answers) if answer == b"away"} or (
            {process.index} if is_away else ()
        )
        return replace(parts, delivery=delivery, away=away)


def to_remove(
    checkpoints: Sequence[str],
    *,
    limit: int | None,
    best: str | None = None,
    pinned: Collection[str] = (),
    in_flight: Collection[str] = (),
) -> list[str]:
    """The checkpoints to remove, of those that are committed, the oldest first: those beyond `limit` that nobody needs.

    The newest always stays: a resume starts from it. So does the one before it while a save is in flight, since that
    may fail and the newest may turn out to be corrupt. `best` is never removed, and does not count unless it is the
    newest. Neither are those `pinned` or `in_flight`, which are being written or read right now.
    """
    if not limit or limit < 0:
        return []
    apart = {*pinned, *in_flight, *({best} - {*checkpoints[-1:]})}
    counted = [name for name in checkpoints if name not in apart]
    needed = {*checkpoints[-1:], *(checkpoints[-2:] if in_flight else ())}
    return [name for name in counted[: max(0, len(counted) - limit)] if name not in needed]
