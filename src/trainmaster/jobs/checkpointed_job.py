"""`CheckpointedJob`: a job class that saves and loads trees of arrays, its own and those of other jobs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from trainmaster.jobs.basic_job import BasicJob
from trainmaster.jobs.checkpoint import CorruptCheckpointError
from trainmaster.jobs.committing import LATEST
from trainmaster.jobs.configuration import plain, to_yaml
from trainmaster.jobs.loading import METADATA
from trainmaster.jobs.locking import Lock
from trainmaster.jobs.registrar import Registrar
from trainmaster.jobs.registry import name_of
from trainmaster.jobs.roots import Root, checked, open_root
from trainmaster.jobs.saving import Saver
from trainmaster.jobs.spec import ExecutionSpec
from trainmaster.protocol.identity import POINTERS

C = TypeVar("C")

KIND = "job_class"
JOB_FILE = "job.json"
CONFIG_FILE = "config.yaml"


class CheckpointedJob(BasicJob[C]):
    """A job that saves and loads trees of arrays, each with metadata.

    A checkpoint lies at `checkpoints_dir / rel_path`, where `rel_path` is `project/group/name/suffix`. The methods
    whose names end in `_from_path` take any `rel_path`, so that a job can use another one's checkpoints; the others
    take the suffix and mean this job's own. All of them are collective.
    """

    save_total_limit: ClassVar[int | None] = None
    """How many checkpoints of this job are kept beside the latest and the best; None: all. In the directory of a
    server, that server says so instead."""

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

    @staticmethod
    def _get_checkpoint_path(spec: ExecutionSpec, suffix: str | os.PathLike[str]) -> Path:
        """The absolute path of a checkpoint, where checkpoints lie in a directory."""
        return spec.cluster.checkpoints_dir / spec.path / checked(suffix)

    def get_tree_and_metadata_from_path(
        self, rel_path: str | os.PathLike[str], template_tree: Any, partial: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """A tree and its metadata.

        From a checkpoint of this job's own, all random-number generators go on where they were, too; a partial load
        leaves them alone.

        Args:
            rel_path: which checkpoint, below the root.
            template_tree: shapes, types, devices and sharding of what is wanted.
            partial: load only what the template has, and of that only what is there and fits (the weights of a
                trainer's checkpoint without its optimizer, for one); the rest stays as it is in the template.

        Raises:
            FileNotFoundError: nothing is committed there.
            CorruptCheckpointError: it is not what was committed.
            InexactResumeError: it is this job's own, and was written by another number of processes.
            TreeError: the tree does not fit the template.
        """
        place = checked(rel_path)
        exact = self.is_own(place) and not partial
        loaded = self._saver.load(place, template_tree, partial=partial, exact=exact)
        return loaded.tree, loaded.metadata

    def get_tree_and_metadata(
        self, suffix: str | os.PathLike[str], template_tree: Any, partial: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """The same, of one of this job's own checkpoints."""
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
        """Save a tree and metadata. This returns when the tree may change again; the files are written meanwhile.

        Args:
            rel_path: where it will be found. A checkpoint is never replaced: where there is one, `-attempt-N` is
                added to the name, and for this process the path means the new one.
            tree: nested mappings and sequences with arrays of numpy, torch or JAX, and plain values, in them.
            metadata: anything that JSON can hold.
            step: how far it is; by default `metadata["step"]`, if it is there.
            epoch: likewise.
            metrics: what is known of its quality.

        Raises:
            ValueError: the path is none, or belongs to a pointer.
            TypeError: the metadata is no JSON.
            TreeError: the tree holds something that cannot be saved.
            NotOwnerError, OSError, SaveError: the save before this one went wrong.
        """
        place = checked(rel_path)
        if any(part in POINTERS for part in place.split("/")):
            raise ValueError(f"{place}: {' and '.join(POINTERS)} point to checkpoints, and cannot be saved to")
        self._settle()
        self._registrar.expect(place)
        try:
            self._saver.save(
                tree,
                rel_path=place,
                kind=KIND,
                step=int(metadata.get("step", 0) if step is None else step),
                epoch=epoch,
                metrics=metrics or {},
                metadata=metadata,
                files={JOB_FILE: json.dumps(self._described(), indent=1), CONFIG_FILE: to_yaml(plain(self.config))},
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
        """The same, as one of this job's own checkpoints."""
        place = f"{self.spec.path}/{checked(suffix)}"
        self.save_tree_and_metadata_from_path(place, tree, metadata, step=step, epoch=epoch, metrics=metrics)

    def get_metadata_from_path(self, rel_path: str | os.PathLike[str]) -> dict[str, Any]:
        """The metadata of a checkpoint alone."""
        metadata: dict[str, Any] = json.loads(self.root.read(checked(rel_path), METADATA))
        return metadata

    def get_metadata(self, suffix: str | os.PathLike[str]) -> dict[str, Any]:
        """The same, of one of this job's own checkpoints."""
        return self.get_metadata_from_path(self._own(suffix))

    def checkpoint_due(self, step: int, every: int = 0) -> bool:
        """Whether to save now: after every so many steps, when somebody asks for it, and before a stop.

        Collective: all processes ask, at the same step.
        """
        wanted = self._wishes.look()
        return wanted or bool(every and step % every == 0)

    def is_own(self, rel_path: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint is one of this job's own, and not another job's."""
        return checked(rel_path).startswith(f"{self.spec.path}/")

    def _own(self, suffix: str | os.PathLike[str]) -> str:
        self._settle()
        place = self._registrar.place_of(own_place(self.root, self.spec, suffix))
        return str(self.process.broadcast(place, "the place of a checkpoint"))

    def hold(self, lock: Lock | None) -> None:
        """From now on, commit nothing without this lock."""
        self._registrar.lock = lock

    def _settle(self) -> None:
        try:
            self._saver.wait()
        finally:
            self._registrar.expect(None)

    def _rescue(self) -> None:
        # With several processes nobody knows where the others are, and who waits for them may wait for ever.
        if self.process.count == 1:
            with contextlib.suppress(Exception):
                self._saver.wait()

    def _described(self) -> dict[str, Any]:
        return {**self.spec.to_json(), "job_class": name_of(type(self)), "restored_from": self.restored_from}


def own_place(root: Root, spec: ExecutionSpec, suffix: str | os.PathLike[str]) -> str:
    """Where one of a job's own checkpoints lies; `latest` and `best` name the one that they point to."""
    if (text := os.fspath(suffix)) in POINTERS:
        pointed = pointed_suffix(root, spec, text)
        if pointed is None:
            raise FileNotFoundError(f"{spec.path} has no {text} checkpoint")
        text = pointed
    return f"{spec.path}/{checked(text)}"


def pointed_suffix(root: Root, spec: ExecutionSpec, pointer: str) -> str | None:
    """The checkpoint of a job that `latest` or `best` points to; in place of a latest that is gone, the newest."""
    suffix = root.pointer(spec.path, pointer)
    try:
        if suffix is None or root.manifest(f"{spec.path}/{checked(suffix)}") is not None:
            return suffix
    except CorruptCheckpointError:
        return suffix  # It is there; who reads it finds out.
    left = root.committed(spec.path)
    return left[-1].removeprefix(f"{spec.path}/") if left and pointer == LATEST else None
