"""`RestoreableJob`: a job class that continues from its latest checkpoint, and can be made from any.

A subclass, `class Pretrain(RestoreableJob[PretrainConfig])`, does not know where it runs: the same class works in a
notebook (`Pretrain.local(...)`), in the foreground (`trainmaster run`) and as a job of a server.
"""

from __future__ import annotations

import inspect
import json
import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Self, TypeVar

from trainmaster.jobs import ambient, checkpoint_reader
from trainmaster.jobs.basic_job import UnknownJobClassError, known_class, make_job
from trainmaster.jobs.checkpoint import check_path
from trainmaster.jobs.checkpoint_reader import BEST, LATEST, find, path_of, paths, pointed
from trainmaster.jobs.checkpoint_saver import finish_saves
from trainmaster.jobs.checkpointed_job import CONFIG_FILE, JOB_FILE, CheckpointedJob
from trainmaster.jobs.config_document import from_yaml, overlaid, overlay_of
from trainmaster.jobs.process import current_process
from trainmaster.jobs.roots import Root, open_root
from trainmaster.jobs.spec import ExecutionSpec
from trainmaster.protocol.launch import POINTERS

C = TypeVar("C")


class RestoreableJob(CheckpointedJob[C]):
    """A job that continues from its latest checkpoint whenever it is started."""

    @abstractmethod
    def restore_from_path(self, rel_path: str | os.PathLike[str]) -> None:
        """Restore this job's state from a checkpoint, which may be another job's."""

    def restore(self, suffix: str | os.PathLike[str]) -> None:
        self._restore_from_place(self._find(self._own(suffix)))

    def register(self, suffix: str | os.PathLike[str], *, best: bool = False) -> None:
        """Make a checkpoint, once it is committed, the latest, from which the job continues; or also the best."""
        if self.is_main:
            path = self._own(suffix)
            self._registrar.register(path, POINTERS if best or path == self._own(BEST) else (LATEST,))

    @classmethod
    def latest(cls, spec: ExecutionSpec) -> str | None:
        """The suffix of the latest checkpoint, or of the newest if that is gone; None if none was ever registered."""
        return _pointed_suffix(spec, LATEST)

    @classmethod
    def best(cls, spec: ExecutionSpec) -> str | None:
        """The suffix of the best checkpoint; None if none was registered as the best."""
        return _pointed_suffix(spec, BEST)

    @classmethod
    def checkpoints(cls, spec: ExecutionSpec) -> list[str]:
        """The suffixes that this job can be restored from, in the order of their newest saves, the oldest first."""
        finish_saves()
        found = paths(open_root(spec.cluster.checkpoints_uri), spec.path)
        return [path.removeprefix(f"{spec.path}/") for path in found]

    @classmethod
    def from_checkpoint_path(
        cls,
        rel_path: str | os.PathLike[str],
        spec: ExecutionSpec,
        runtime_cfg: C | Mapping[str, Any] | None = None,
        resume: bool = False,
        *,
        elastic: bool = False,
    ) -> tuple[Self, C]:
        """Make a job from a checkpoint and restore it, collectively; returns the job and its configuration.

        Args:
            spec: what the job runs on, and where its checkpoints are.
            runtime_cfg: values that override the checkpoint's configuration.
            resume: continue as the job that wrote it, with its name, project, group and tracker run. Otherwise the job
                has the identity of `spec`.
            elastic: allow another number of processes, as `CheckpointedJob.elastic` does.

        Raises:
            FileNotFoundError, CorruptCheckpointError: nothing is committed there, or not what is there now.
            ConfigurationError: the configuration does not fit the class.
            UnknownJobClassError: the class that wrote it is not loaded, and this class is abstract.
        """
        finish_saves()
        current_process().barrier(f"restore {check_path(rel_path)}")  # process 0 commits
        root = open_root(spec.cluster.checkpoints_uri)
        return cls._from_place(find(root, check_path(rel_path)), spec, runtime_cfg, resume, elastic=elastic)

    @classmethod
    def _from_place(
        cls, place: str, spec: ExecutionSpec, runtime_cfg: C | Mapping[str, Any] | None, resume: bool, *, elastic: bool
    ) -> tuple[Self, C]:
        """The same from the checkpoint at exactly this place, even if its path has newer saves."""
        root = open_root(spec.cluster.checkpoints_uri)
        saved, document = identity_and_configuration(root, place)
        if runtime_cfg is not None:
            document = overlaid(document, overlay_of(runtime_cfg))
        made = cls._class_for(saved.get("job_class") or document.get("job", ""), place)
        job = make_job(made, spec.with_identity(saved) if resume else spec, document)
        job.restored_from = saved.get("restored_from") if resume else place
        job.elastic = job.elastic or elastic
        job._restore_from_place(place)
        config: Any = job._ambient if ambient.declares(type(job)) else job.config
        return job, config

    @classmethod
    def from_checkpoint(
        cls,
        suffix: str | os.PathLike[str],
        spec: ExecutionSpec,
        runtime_cfg: C | Mapping[str, Any] | None = None,
        resume: bool = False,
        *,
        elastic: bool = False,
    ) -> tuple[Self, C]:
        """Make a job from one of the checkpoints of `spec`; see `from_checkpoint_path`."""
        return cls.from_checkpoint_path(f"{spec.path}/{check_path(suffix)}", spec, runtime_cfg, resume, elastic=elastic)

    def _restore_from_place(self, place: str) -> None:
        self._restoring = place
        try:
            with self._configured():
                self.restore_from_path(place)
        finally:
            self._restoring = None

    @classmethod
    def _class_for(cls, name: str, place: str) -> type[Self]:
        """The class that wrote a checkpoint if it is a subclass of this one; else this one, unless it is abstract."""
        if (known := known_class(name)) is not None and issubclass(known, cls):
            return known
        if inspect.isabstract(cls):
            raise UnknownJobClassError(
                f"{place} was written by the job class {name!r}, which is not loaded; import its module first, or call "
                "from_checkpoint_path on the class itself"
            )
        return cls


def identity_and_configuration(root: Root, place: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The identity and the configuration that a checkpoint holds; raises FileNotFoundError if no job class wrote it."""
    theirs = checkpoint_reader.theseus_directory(root, place) if root.manifest(place) is None else None
    if theirs is not None:
        job, config = ((theirs / name).read_bytes() for name in (JOB_FILE, CONFIG_FILE))
    else:
        job, config = (root.read(place, name) for name in (JOB_FILE, CONFIG_FILE))
    return json.loads(job), from_yaml(config.decode(), f"{place}/{CONFIG_FILE}")


def _pointed_suffix(spec: ExecutionSpec, pointer: str) -> str | None:
    finish_saves()
    root = open_root(spec.cluster.checkpoints_uri)
    place = pointed(root, spec.path, pointer)
    return None if place is None else path_of(root, place).removeprefix(f"{spec.path}/")
