"""`CheckpointedJob`: a job class that saves and loads trees of arrays."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from trainmaster.jobs import ambient, checkpoint_reader, report, rng
from trainmaster.jobs.basic_job import BasicJob, name_of
from trainmaster.jobs.checkpoint import CorruptCheckpointError, check_path
from trainmaster.jobs.checkpoint_reader import BEST, LATEST, METADATA, THESEUS_METADATA, find
from trainmaster.jobs.checkpoint_saver import SavedCheckpoint, Saver, finish_saves
from trainmaster.jobs.config_document import to_yaml
from trainmaster.jobs.lock import Lock
from trainmaster.jobs.process import call_on_first
from trainmaster.jobs.roots import Root, open_root
from trainmaster.jobs.spec import ExecutionSpec

C = TypeVar("C")

KIND = "job_class"
JOB_FILE = "job.json"
CONFIG_FILE = "config.yaml"


class CheckpointedJob(BasicJob[C]):
    """A job that saves and loads trees of arrays, each with metadata.

    A checkpoint is at `checkpoints_dir / rel_path`, where `rel_path` is `project/group/name/suffix`. Methods whose
    names end in `_from_path` take any `rel_path`, so that a job can use another job's checkpoints; the others take a
    suffix of this job's own. A path means its newest committed save. All of these methods are collective.
    """

    save_total_limit: ClassVar[int | None] = None
    """How many checkpoints to keep beside the latest and the best; None: all. A server applies its own retention."""
    elastic: bool = False
    """Whether the job may continue from its own checkpoint with another number of processes. Arrays are then resharded
    as the template says, and the random-number generators are not restored."""

    def __init__(self, spec: ExecutionSpec, config: C | Mapping[str, Any] | None = None) -> None:
        super().__init__(spec, config)
        self.root: Root = open_root(spec.cluster.checkpoints_uri)
        self._registrar = Registrar(self.root, spec.path)
        self._saver = Saver(
            self.root,
            self.process,
            home=spec.path,
            keep=self.save_total_limit,
            check_owner=self._registrar.check_owner,
            on_commit=self._registrar.on_commit,
        )
        self._key: Any = None
        self._restoring: str | None = None
        """The place of the checkpoint that the job is being restored from, even if its path has newer saves."""

    @property
    def key(self) -> Any:
        """A JAX key for this job to split, the same on every process; saved and restored with its checkpoints."""
        if self._key is None:
            import jax

            self._key = jax.random.PRNGKey(0)
        return self._key

    @key.setter
    def key(self, key: Any) -> None:
        self._key = key

    @staticmethod
    def _get_checkpoints_dir(spec: ExecutionSpec) -> Path:
        """The directory of all checkpoints; on an object store there is none."""
        return spec.cluster.checkpoints_dir

    @staticmethod
    def _get_checkpoint_rel_path(spec: ExecutionSpec, suffix: str | os.PathLike[str]) -> Path:
        """`project/group/name/suffix`."""
        return Path(spec.path, suffix)

    @staticmethod
    def _get_checkpoint_path(spec: ExecutionSpec, suffix: str | os.PathLike[str]) -> Path | str:
        """The absolute path or URI of a checkpoint, whether it exists or not."""
        finish_saves()
        root = open_root(spec.cluster.checkpoints_uri)
        if Path(suffix) == Path():
            where = root.locate(spec.path)
        else:
            path = f"{spec.path}/{check_path(suffix)}"
            with contextlib.suppress(FileNotFoundError):
                path = find(root, path)
            where = root.locate(path)
        return Path(where) if root.is_directory else where

    def get_tree_and_metadata_from_path(
        self, rel_path: str | os.PathLike[str], template_tree: Any, partial: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """Load a tree and its metadata.

        From one of this job's own checkpoints, all random-number generators are restored, too, unless the load is
        partial. Any number of processes can load a checkpoint, but only the number that saved it can restore the
        generators: with `elastic`, another number leaves them alone.

        Args:
            template_tree: shapes, types, devices and sharding of the tree.
            partial: load only what the template has and what fits (such as the weights of a checkpoint without its
                optimizer); the rest stays as in the template.

        Raises:
            FileNotFoundError, CorruptCheckpointError: nothing is committed there, or not what is there now.
            InexactResumeError: it is this job's own, another number of processes saved it, and `elastic` is not set.
            TreeError: the tree does not fit the template.
        """
        place = self._find(rel_path)
        if (directory := self._theseus_directory(place)) is not None:
            tree = checkpoint_reader.theseus_tree(directory, template_tree, partial=partial)
            return tree, checkpoint_reader.theseus_metadata(directory)
        exact = self.is_own(place) and not partial
        loaded = self._saver.load(place, template_tree, partial=partial, exact=exact, elastic=self.elastic)
        if exact and self.is_main and loaded.manifest.world_size != self.process.count:
            counts = f"saved by {loaded.manifest.world_size} processes, loaded by {self.process.count}"
            report.note(f"{place}: {counts}; the random-number generators were not restored")
        if exact and any(file.path == rng.KEY_FILE for file in loaded.manifest.files):
            self._key = rng.key_from_json(self.root.read(place, rng.KEY_FILE))
        return loaded.tree, loaded.metadata

    def get_tree_and_metadata(
        self, suffix: str | os.PathLike[str], template_tree: Any, partial: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """Load one of this job's own checkpoints; see `get_tree_and_metadata_from_path`."""
        return self.get_tree_and_metadata_from_path(self._own(suffix), template_tree, partial)

    def save_tree_and_metadata_from_path(
        self,
        rel_path: str | os.PathLike[str],
        tree: Any,
        metadata: Mapping[str, Any],
        *,
        step: int | None = None,
        epoch: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Save a tree and metadata. When this returns the tree may be changed; the files are written in the background.

        Args:
            rel_path: the path of the checkpoint. Earlier saves to it stay until retention removes them. A save to this
                job's suffix `best` becomes its best checkpoint; none can be saved to `latest`, which is a pointer.
            tree: nested mappings and sequences of arrays of numpy, torch or JAX, and plain values.
            metadata: any JSON object.
            step: the step; by default `metadata["step"]` or `metadata["steps"]`, if present.

        Raises:
            TreeError: the tree holds something that cannot be saved.
            NotOwnerError, OSError, SaveError: the previous save failed.
        """
        place = check_path(rel_path)
        if LATEST in place.split("/"):
            raise ValueError(f"{place}: {LATEST} points to a checkpoint, and cannot be saved to")
        self._settle()
        self._registrar.expect(place)
        identity = {**self.spec.to_json(), "job_class": name_of(type(self)), "restored_from": self.restored_from}
        try:
            self._saver.save(
                tree,
                rel_path=place,
                kind=KIND,
                step=int(metadata.get("step", metadata.get("steps", 0)) if step is None else step),
                epoch=epoch,
                metrics=metrics or {},
                metadata=metadata,
                files={
                    JOB_FILE: json.dumps(identity, indent=1),
                    CONFIG_FILE: to_yaml(self._document()),
                    **rng.key_files(self._key),
                    # Classes in the form of theseus may read the metadata themselves, from a file of this name.
                    **({THESEUS_METADATA: json.dumps(dict(metadata))} if ambient.declares(type(self)) else {}),
                },
            )
        except BaseException:
            self._registrar.expect(None)
            raise

    def save_tree_and_metadata(
        self,
        suffix: str | os.PathLike[str],
        tree: Any,
        metadata: Mapping[str, Any],
        *,
        step: int | None = None,
        epoch: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Save one of this job's own checkpoints; see `save_tree_and_metadata_from_path`."""
        self.save_tree_and_metadata_from_path(
            self._own(suffix), tree, metadata, step=step, epoch=epoch, metrics=metrics
        )

    def get_metadata_from_path(self, rel_path: str | os.PathLike[str]) -> dict[str, Any]:
        """Read the metadata of a checkpoint without its tree."""
        place = self._find(rel_path)
        if (directory := self._theseus_directory(place)) is not None:
            return checkpoint_reader.theseus_metadata(directory)
        metadata: dict[str, Any] = json.loads(self.root.read(place, METADATA))
        return metadata

    def get_metadata(self, suffix: str | os.PathLike[str]) -> dict[str, Any]:
        """Read the metadata of one of this job's own checkpoints."""
        return self.get_metadata_from_path(self._own(suffix))

    def checkpoint_due(self, step: int, every: int = 0) -> bool:
        """Whether to save now: every `every` steps, on request, before a stop. All processes ask at the same step."""
        return self._requests.poll() or bool(every and step % every == 0)

    def is_own(self, rel_path: str | os.PathLike[str]) -> bool:
        return check_path(rel_path).startswith(f"{self.spec.path}/")

    def _own(self, suffix: str | os.PathLike[str]) -> str:
        return f"{self.spec.path}/{check_path(suffix)}"

    def _find(self, rel_path: str | os.PathLike[str]) -> str:
        """The place of the newest save to a path, after a save that is under way; the same on every process."""
        self._settle()
        path = check_path(rel_path)
        if path == self._restoring:
            return path
        errors = (FileNotFoundError, CorruptCheckpointError)
        return call_on_first(self.process, f"find {path}", lambda: find(self.root, path), errors=errors)

    def _theseus_directory(self, place: str) -> Path | None:
        return None if self.root.manifest(place) is not None else checkpoint_reader.theseus_directory(self.root, place)

    def hold(self, lock: Lock | None) -> None:
        self._registrar.lock = lock

    def _settle(self) -> None:
        try:
            self._saver.wait()
        finally:
            self._registrar.expect(None)

    def _rescue(self) -> None:
        # With several processes the others may be anywhere, and waiting for them may never end.
        if self.process.count == 1:
            with contextlib.suppress(Exception):
                self._saver.wait()


class Registrar:
    """Registers checkpoints of a job class on process 0: sets pointers to them and reports them to the server."""

    def __init__(self, root: Root, home: str) -> None:
        self._root = root
        self._home = home
        self._mutex = threading.Lock()
        self._saving: str | None = None
        self._pointers: set[str] = set()
        self._is_best = False
        """Whether the save that is under way becomes the best one, registered or not."""
        self._saved: dict[str, SavedCheckpoint] = {}  # by place
        self._reported: dict[str, bool] = {}
        """Places that were reported to the server, and whether as the best."""
        self.lock: Lock | None = None
        """The lock on the run's identity, if it is held: no commit without it."""

    def expect(self, path: str | None) -> None:
        """Note that a save to this path starts now; None: no save is under way."""
        with self._mutex:
            self._saving, self._pointers = path, set()
            self._is_best = path == f"{self._home}/{BEST}"

    def register(self, path: str, pointers: Collection[str]) -> None:
        """Set pointers to a checkpoint: now, or when the save to this path that is under way is committed."""
        with self._mutex:
            if path == self._saving:
                self._pointers |= set(pointers)
            else:
                self._register(find(self._root, path), pointers)

    def check_owner(self) -> None:
        """Raise unless this process still owns its job and the run's lock."""
        if self.lock is not None:
            self.lock.require()
        report.reporter.require_ownership()

    def on_commit(self, saved: SavedCheckpoint) -> None:
        """Set the pointers that waited for this commit; only then report it, since a new attempt continues from it."""
        with self._mutex:
            self._saved[saved.rel_path] = saved
            self._saving = None
            if self._pointers:
                self._register(saved.rel_path, self._pointers | ({BEST} if self._is_best else set()))
            elif self._is_best:
                self._point(saved.rel_path, BEST)

    def _register(self, place: str, pointers: Collection[str]) -> None:
        for name in pointers:
            self._point(place, name)
        self._report(place, is_best=BEST in pointers)

    def _report(self, place: str, *, is_best: bool) -> None:
        saved = self._saved.get(place)
        if saved is not None and self._reported.get(place) not in (True, is_best):
            self._reported[place] = is_best
            report.reporter.committed(saved.manifest, self._root.locate(place), took_s=saved.took_s, is_best=is_best)

    def _point(self, place: str, pointer: str) -> None:
        self._root.point(self._home, pointer, place.removeprefix(f"{self._home}/"))
