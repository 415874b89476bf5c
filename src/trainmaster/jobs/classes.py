"""Job classes with a memory: `CheckpointedJob` saves and loads trees, `RestoreableJob` finds its way back.

A subclass is written against a configuration of its own, `class Pretrain(RestoreableJob[PretrainConfig])`, and knows
nothing of where it runs: the same class works in a notebook (`Pretrain.local(...)`), in the foreground
(`trainmaster run`) and as a job of a server.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from trainmaster.jobs.basic import BasicJob
from trainmaster.jobs.checkpoint import CorruptCheckpointError
from trainmaster.jobs.configuration import from_yaml, overlaid, overlay_of, plain, to_yaml
from trainmaster.jobs.loading import METADATA
from trainmaster.jobs.locking import Lock
from trainmaster.jobs.registering import Registrar
from trainmaster.jobs.registry import UnknownJobClassError, known_class, name_of
from trainmaster.jobs.roots import Root, checked, open_root
from trainmaster.jobs.saving import Saver
from trainmaster.jobs.spec import ExecutionSpec
from trainmaster.protocol.identity import POINTERS

C = TypeVar("C")

LATEST, BEST = POINTERS
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
    """Outside a server: how many checkpoints of this job are kept, beside the latest and the best. None: all."""

    def __init__(self, spec: ExecutionSpec, config: C | Mapping[str, Any] | None = None) -> None:
        super().__init__(spec, config)
        self.root: Root = open_root(spec.cluster.checkpoints_uri)
        self._registrar = Registrar(self.root, spec.path)
        self._saver = Saver(
            self.root,
            self.process,
            home=spec.path,
            keep=self.save_total_limit,
            reporter=self._registrar,  # type: ignore[arg-type]  # it does all that a saver asks of one
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
        self._saver.wait()
        self._registrar.expect(place)
        self._saver.save(
            tree,
            rel_path=place,
            rename=True,
            kind=KIND,
            step=int(metadata.get("step", 0) if step is None else step),
            epoch=epoch,
            metrics=metrics or {},
            metadata=metadata,
            files={JOB_FILE: json.dumps(self._described(), indent=1), CONFIG_FILE: to_yaml(plain(self.config))},
        )

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
        self._saver.wait()
        place = self._registrar.place_of(_own(self.root, self.spec, suffix))
        return str(self.process.broadcast(place, "the place of a checkpoint"))

    def hold(self, lock: Lock | None) -> None:
        """From now on, commit nothing without this lock."""
        self._registrar.lock = lock

    def _settle(self) -> None:
        self._saver.wait()

    def _rescue(self) -> None:
        # With several processes nobody knows where the others are, and who waits for them may wait for ever.
        if self.process.count == 1:
            with contextlib.suppress(Exception):
                self._saver.wait()

    def _described(self) -> dict[str, Any]:
        return {**self.spec.to_json(), "job_class": name_of(type(self)), "restored_from": self.restored_from}


class RestoreableJob(CheckpointedJob[C]):
    """A job that goes on from its latest checkpoint, however often it is started."""

    @abstractmethod
    def restore_from_path(self, rel_path: str | os.PathLike[str]) -> None:
        """Take this job's state from a checkpoint, which may be another job's."""

    def restore(self, suffix: str | os.PathLike[str]) -> None:
        """The same, from one of this job's own checkpoints."""
        self.restore_from_path(self._own(suffix))

    def register(self, suffix: str | os.PathLike[str], *, best: bool = False) -> None:
        """Make a checkpoint the latest, from which the job goes on when it is started again.

        One that is still being written is registered when it is committed, and not before. With `best`, it becomes
        the best one, too.

        Raises:
            FileNotFoundError: there is no such checkpoint.
        """
        if self.is_main:
            self._registrar.register(f"{self.spec.path}/{checked(suffix)}", POINTERS if best else (LATEST,))

    @classmethod
    def latest(cls, spec: ExecutionSpec) -> str | None:
        """The suffix of the latest checkpoint; None when none was ever registered.

        Where what was registered is gone, the newest that is there stands in for it.
        """
        return _pointed(open_root(spec.cluster.checkpoints_uri), spec, LATEST)

    @classmethod
    def best(cls, spec: ExecutionSpec) -> str | None:
        """The suffix of the best checkpoint; None when none was ever said to be."""
        return _pointed(open_root(spec.cluster.checkpoints_uri), spec, BEST)

    @classmethod
    def checkpoints(cls, spec: ExecutionSpec) -> list[str]:
        """The suffixes of all checkpoints that this job can be restored from, the oldest first."""
        found = open_root(spec.cluster.checkpoints_uri).committed(spec.path)
        return [rel_path.removeprefix(f"{spec.path}/") for rel_path in found]

    @classmethod
    def from_checkpoint_path(
        cls,
        rel_path: str | os.PathLike[str],
        spec: ExecutionSpec,
        runtime_cfg: C | Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> tuple[Self, C]:
        """A job made and restored from a checkpoint.

        Args:
            rel_path: which one, below the root.
            spec: what it runs on; says where the checkpoint is found.
            runtime_cfg: values that win over the checkpoint's configuration.
            resume: go on as the very job that wrote it: name, project, group and the tracker's run are the saved ones.
                Otherwise the job is who `spec` says that it is.

        Returns:
            The job, whose `spec` is the one that holds, and its configuration.

        Raises:
            FileNotFoundError: nothing is committed there.
            CorruptCheckpointError: it is not what was committed.
            ConfigurationError: the configuration does not fit the class.
            UnknownJobClassError: the class that wrote it is not loaded, and this is none that could be made.
        """
        place, root = checked(rel_path), open_root(spec.cluster.checkpoints_uri)
        saved = json.loads(root.read(place, JOB_FILE))
        document = from_yaml(root.read(place, CONFIG_FILE).decode(), f"{place}/{CONFIG_FILE}")
        if runtime_cfg is not None:
            document = overlaid(document, overlay_of(runtime_cfg))
        job = cls._class_for(saved.get("job_class", ""), place)(spec.with_identity(saved) if resume else spec, document)
        if resume:
            job.restored_from = saved.get("restored_from")
        else:
            job.restored_from = place
        job.restore_from_path(place)
        return job, job.config

    @classmethod
    def from_checkpoint(
        cls,
        suffix: str | os.PathLike[str],
        spec: ExecutionSpec,
        runtime_cfg: C | Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> tuple[Self, C]:
        """The same, from one of the checkpoints that belong to `spec`."""
        place = _own(open_root(spec.cluster.checkpoints_uri), spec, suffix)
        return cls.from_checkpoint_path(place, spec, runtime_cfg, resume)

    @classmethod
    def _class_for(cls, name: str, place: str) -> type[Self]:
        """The class that wrote a checkpoint, if it is this one or one of its kind; else this one, if it can be made."""
        known = known_class(name)
        if known is not None and issubclass(known, cls):
            return known
        if inspect.isabstract(cls):
            raise UnknownJobClassError(
                f"{place} was written by the job class {name!r}, which is not loaded; import its module first, or call "
                "from_checkpoint_path on the class itself"
            )
        return cls


def _own(root: Root, spec: ExecutionSpec, suffix: str | os.PathLike[str]) -> str:
    """Where one of a job's own checkpoints lies; `latest` and `best` name the one that they point to."""
    if (text := os.fspath(suffix)) in POINTERS:
        pointed = _pointed(root, spec, text)
        if pointed is None:
            raise FileNotFoundError(f"{spec.path} has no {text} checkpoint")
        text = pointed
    return f"{spec.path}/{checked(text)}"


def _pointed(root: Root, spec: ExecutionSpec, pointer: str) -> str | None:
    suffix = root.pointer(spec.path, pointer)
    try:
        if suffix is None or root.manifest(f"{spec.path}/{checked(suffix)}") is not None:
            return suffix
    except CorruptCheckpointError:
        return suffix  # It is there; who reads it finds out.
    left = root.committed(spec.path)
    return left[-1].removeprefix(f"{spec.path}/") if left and pointer == LATEST else None
