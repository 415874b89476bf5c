"""Saves checkpoints while training goes on, and loads them.

`Saver.save` returns when the tree was copied away. A thread writes the copy, waits for the parts of other
ranks, commits and tells the server. One save is under way at a time: the next one waits for it, and raises
what went wrong with it.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from trainmaster.jobs import checkpoint_reader, report, rng, trees
from trainmaster.jobs.attempt import NotOwnerError
from trainmaster.jobs.checkpoint import Manifest, check_path
from trainmaster.jobs.checkpoint_reader import BEST, LATEST, METADATA, InexactResumeError, Loaded
from trainmaster.jobs.commit import Commit, Parts, Saved
from trainmaster.jobs.objects import S3_SCHEME
from trainmaster.jobs.process import Process, SingleProcess
from trainmaster.jobs.reporter import Reporter
from trainmaster.jobs.roots import Root
from trainmaster.jobs.trees.writer import TREE

__all__ = ["BEST", "LATEST", "InexactResumeError", "Loaded", "SaveError", "Saved", "Saver"]

TIMEOUT_S = 1800.0
"""How long rank 0 waits for the other ranks' parts."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RESERVED = frozenset({METADATA, TREE, "manifest.json"})


_savers: weakref.WeakSet[Saver] = weakref.WeakSet()
"""Of this process, for those who read without one."""


def finish_saves() -> None:
    """Return when no saver of this process writes any more; whether it went well, `Saver.wait` says. Not collective."""
    for saver in list(_savers):
        saver.join()


class SaveError(RuntimeError):
    """A checkpoint was not saved."""


class Saver:
    """Saves and loads checkpoints of one job below one root.

    With several processes, `save`, `wait` and the loads are collective: all call them, in the same order. One
    thread at a time may use a saver. Leave it by `close`, or by the end of a `with` block: a save that is under
    way when the interpreter ends is lost.
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
        on_commit: Callable[[Saved], None] | None = None,
        staging_bytes: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Write nothing yet.

        Args:
            root: where checkpoints lie.
            process: this process among those that train together; by default it is alone.
            home: the directory below the root that is this job's own, with its pointers; `keep` counts there.
            keep: how many checkpoints to keep; None for all. Where a server manages the root, it prunes instead.
            reporter: that of this process, unless it is another.
            check_owner: called on process 0 right before a commit, which it prevents by raising; by default, that of
                the reporter.
            on_commit: told of every commit, on process 0; by default, the reporter tells the server.
            staging_bytes: most that copies may take of the host's memory; a larger tree is copied in several turns.
            timeout_s: how long to wait for the parts of other ranks.
        """
        self._root = root
        self._process = process if process is not None else SingleProcess()
        self._home = check_path(home, empty=True)
        self._keep = keep
        self._reporter = reporter if reporter is not None else report.reporter
        self._check_owner = check_owner if check_owner is not None else self._reporter.require_ownership
        self._on_commit = on_commit if on_commit is not None else self._tell
        self._prunes = self._reporter.job_id() is None or root.uri.startswith(S3_SCHEME)
        self._buffers = trees.Buffers(staging_bytes)
        self._timeout_s = timeout_s
        self._thread: threading.Thread | None = None
        self._pending = False
        self._problem: BaseException | None = None
        self._saved: Saved | None = None
        _savers.add(self)

    def prepare(self, tree: Any) -> None:
        """Get the memory for copies of this tree in the background, so that the first save does not wait for it."""
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
        """Begin to save; when this returns, the tree may be changed again.

        Args:
            tree: what to save. Whole arrays and plain values are those of process 0.
            rel_path: where it will be found below the root. A second save to the same path lies beside the first, under
                another name; `Saved.rel_path` says where.
            step: how far training is.
            epoch: likewise.
            metrics: what is known of its quality.
            metadata: anything that JSON can hold, such as the position in the data.
            files: further files, by name.
            point: pointers in `home` that shall lead to it once it is committed, such as `latest`.
            kind: what makes it, for the manifest.
            name: what its user calls it, likewise.
            attributes: what else the server should know of it, likewise.

        Raises:
            TreeError: the tree holds something that cannot be saved; names its path.
            TypeError, ValueError: the metadata is no JSON, or a name is none.
            NotOwnerError, OSError, SaveError: the save before this one went wrong; this one did not begin.
        """
        self.wait()
        began = time.monotonic()
        rel_path = check_path(rel_path)
        plan = trees.plan(tree, process=self._process)
        texts = {METADATA: json.dumps(dict(metadata or {}), indent=1), **_checked_files(files or {})}
        manifest = self._reporter.new_manifest(step=step, epoch=epoch, metrics=metrics)
        manifest = replace(
            manifest,
            world_size=self._process.count,
            kind=kind,
            framework=plan.framework,
            name=name,
            attributes=dict(attributes or {}),
        )
        with contextlib.ExitStack() as scope:
            draft = self._draft(scope, rel_path, manifest, plan.nbytes)
            state = rng.capture()
            parts = Parts(draft, self._process, timeout_s=self._timeout_s)
            try:
                writing = plan.start(draft, self._buffers)
            except BaseException as error:
                parts.failed(error)
                if self._process.count > 1:
                    # The other ranks will ask what became of it.
                    self._pending, self._problem = True, error
                raise
            commit = Commit(
                root=self._root,
                home=self._home,
                process=self._process,
                rel_path=rel_path,
                draft=draft,
                manifest=manifest,
                texts=texts,
                state=state,
                point=tuple(point),
                keep=self._keep if self._prunes else None,
                began=began,
                check_owner=self._check_owner,
                on_commit=self._on_commit,
                note=self._reporter.note,
            )
            kept = scope.pop_all()

        def finish() -> None:
            with kept:
                self._saved = commit.finish(writing, parts)

        self._run(finish)

    @property
    def busy(self) -> bool:
        """Whether something is under way here. Ranks may see it differently."""
        return self._thread is not None and self._thread.is_alive()

    def join(self) -> None:
        """Return when nothing is under way in this process. Not collective, and raises nothing."""
        if (thread := self._thread) is not None and thread is not threading.current_thread():
            thread.join()

    def wait(self) -> Saved | None:
        """Wait until nothing is under way; what was saved since the last wait, if anything.

        Raises:
            NotOwnerError, OSError, SaveError: it went wrong.
        """
        if not self._pending:
            return None
        if self._thread is not None:
            self._thread.join()
        self._thread, self._pending = None, False
        problem, self._problem = self._problem, None
        saved, self._saved = self._saved, None
        if self._process.count > 1:
            said = self._process.broadcast(_outcome(problem, saved), "the outcome of a save")
            if self._process.index != 0:
                # What went wrong here is part of it, or follows from it.
                heard, saved = _heard(said)
                problem = heard if heard is not None else problem
        if problem is not None:
            raise problem
        return saved

    def load(
        self,
        rel_path: str,
        template: Any = trees.ANYTHING,
        *,
        partial: bool = False,
        verify: bool = True,
        exact: bool = False,
        needs: Sequence[str] = (),
        elastic: bool = False,
    ) -> Loaded:
        """Read a checkpoint.

        Args:
            rel_path: which one.
            template: a tree to be like: it gives types, shapes, devices and sharding.
            partial: restore only what the template has; where nothing that fits was saved, keep the template's value.
            verify: whether what is read is compared with what was committed.
            exact: go on just as the training that saved it would have: the random-number generators of this rank
                are put into their state, and it is an error when that is missing.
            needs: names in the tree or the metadata, at their top, without which it is refused.
            elastic: where another number of processes saved it, leave the generators alone instead of refusing.

        Raises:
            FileNotFoundError: nothing is committed there.
            CorruptCheckpointError: a file differs from what was committed, on any rank.
            InexactResumeError: something that was asked for is missing; names it.
            TreeError: the tree does not fit the template; names the paths.
        """
        self.wait()
        return checkpoint_reader.load(
            self._root,
            check_path(rel_path),
            template,
            process=self._process,
            buffers=self._buffers,
            partial=partial,
            verify=verify,
            exact=exact,
            needs=needs,
            elastic=elastic,
        )

    def load_latest_good(
        self,
        template: Any = trees.ANYTHING,
        *,
        start: str | None = None,
        partial: bool = False,
        exact: bool = False,
        needs: Sequence[str] = (),
    ) -> tuple[str, Loaded]:
        """Read the newest checkpoint of this job that is not corrupt, and say which it is.

        Args:
            template: as for `load`.
            start: the one to begin with; by default the newest. None that is newer is looked at.
            partial: as for `load`.
            exact: as for `load`.
            needs: as for `load`.

        Raises:
            FileNotFoundError: nothing is committed.
            CorruptCheckpointError: all of them are corrupt; it is what was wrong with the newest.
        """
        self.wait()
        return checkpoint_reader.load_latest_good(
            self._root,
            self._home,
            template,
            start=start,
            note=self._reporter.note,
            process=self._process,
            buffers=self._buffers,
            partial=partial,
            exact=exact,
            needs=needs,
        )

    def load_rng(self, rel_path: str) -> rng.State:
        """The state of this rank's random-number generators at a save, for `rng.restore`.

        Raises:
            InexactResumeError: the checkpoint has none for this rank.
        """
        return checkpoint_reader.load_rng(self._root, check_path(rel_path), self._process)

    def close(self) -> None:
        """Wait for what is under way, and give the memory for copies back; raises as `wait` does."""
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
            except BaseException as error:  # told by `wait`
                self._problem = error

        self._thread, self._pending = threading.Thread(target=run, name="checkpoint"), True
        self._thread.start()

    def _tell(self, saved: Saved) -> None:
        self._reporter.committed(saved.manifest, self._root.locate(saved.rel_path), took_s=saved.took_s)

    def _draft(self, scope: contextlib.ExitStack, rel_path: str, manifest: Manifest, nbytes: int) -> Path:
        """A directory that all ranks write to; process 0 makes it."""
        said: dict[str, Any] = {}
        problem: Exception | None = None
        if self._process.index == 0:
            try:
                made = self._root.draft(
                    rel_path, job_id=manifest.job_id, attempt=manifest.attempt, expected_bytes=nbytes
                )
                said = {"draft": str(scope.enter_context(made))}
                scope.enter_context(self._reporter.saving())
            except Exception as error:
                problem, said = error, {"error": f"{type(error).__name__}: {error}"}
        said = self._process.broadcast(said, f"save {rel_path}")
        if problem is not None:
            raise problem
        if "error" in said:
            raise SaveError(f"rank 0 could not begin to save {rel_path}: {said['error']}")
        draft = Path(said["draft"])
        if self._process.any(not draft.is_dir()):
            raise SaveError(
                f"not every rank sees {draft}, which rank 0 made: ranks on several machines need a directory that they "
                "share, for checkpoints on an object store too"
            )
        return draft


def _checked_files(files: Mapping[str, str]) -> Mapping[str, str]:
    for name in files:
        if not _FILE_NAME.fullmatch(name) or name in _RESERVED:
            raise ValueError(f"{name!r} cannot be the name of a file in a checkpoint")
    return files


def _outcome(problem: BaseException | None, saved: Saved | None) -> dict[str, Any]:
    if problem is not None:
        return {"error": str(problem), "type": type(problem).__name__}
    if saved is None:
        return {}
    return {"rel_path": saved.rel_path, "manifest": json.loads(saved.manifest.to_bytes()), "took_s": saved.took_s}


def _heard(said: Mapping[str, Any]) -> tuple[BaseException | None, Saved | None]:
    if "error" in said:
        kind = NotOwnerError if said["type"] == NotOwnerError.__name__ else SaveError
        return kind(f"rank 0: {said['error']}"), None
    if not said:
        return None, None
    return None, Saved(said["rel_path"], Manifest.from_json(said["manifest"]), said["took_s"])
