"""`BasicJob`: a class that runs once on every process, with a typed configuration and an answer to being stopped."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar

from trainmaster.jobs import report
from trainmaster.jobs.configuration import config_type, overlay_of, plain, typed
from trainmaster.jobs.control import Stop
from trainmaster.jobs.locking import Lock
from trainmaster.jobs.process import current_process
from trainmaster.jobs.spec import DEFAULT_GROUP, DEFAULT_PROJECT, ExecutionSpec
from trainmaster.jobs.tracking import NONE, Lines, tracker_for
from trainmaster.jobs.wishes import Wishes
from trainmaster.protocol.reasons import Phase

C = TypeVar("C")


class BasicJob(ABC, Generic[C]):
    """Something that runs once, on every process of its job.

    Args:
        spec: who it is, and what it runs on.
        config: its configuration, as a `C` or as plain keys and values; without it, the defaults of `C`.
    """

    tracker: str = NONE
    """The experiment tracker that metrics are mirrored to: `none` or `trackio`."""
    shows_progress: bool = False
    """Whether a line about it is printed every now and then."""

    def __init__(self, spec: ExecutionSpec, config: C | Mapping[str, Any] | None = None) -> None:
        self.spec = spec
        self.config: C = _configured(type(self), config)
        self.process = current_process()
        self.restored_from: str | None = None
        """The checkpoint that another identity's work was taken from, if any."""
        self._wishes = Wishes(self.process)
        self._mirror = tracker_for(NONE)
        self._lines = Lines()

    @classmethod
    def local(
        cls,
        root_dir: str | os.PathLike[str],
        name: str,
        project: str = DEFAULT_PROJECT,
        group: str = DEFAULT_GROUP,
        config: C | Mapping[str, Any] | None = None,
        shard_into: int = 1,
    ) -> Self:
        """The job on this machine, with all its files below `root_dir`: for notebooks and tests."""
        return cls(ExecutionSpec.local(root_dir, name, project, group, shard_into), config)

    @property
    def done(self) -> bool:
        """Whether the job is complete already: asked on process 0 before anything runs, and true for all."""
        return False

    @abstractmethod
    def run(self) -> None:
        """Do the work. All processes are here; each of them calls this."""

    def finish(self) -> None:
        """Called on every process after the work was done and everything was saved."""

    def __call__(self) -> None:
        """Run the job, unless it is done; return when all processes are through and everything is saved.

        Raises:
            SystemExit: it was asked to stop, and has. The code says so to whoever started it.
        """
        if self.process.broadcast(self.is_main and bool(self.done), f"{self.spec.path}:done"):
            if self.is_main:
                sys.stderr.write(f"trainmaster: {self.spec.path} is complete already\n")
            report.finished()
            return
        self._begin_tracking()
        try:
            with self._wishes.signals():
                self.process.barrier(f"{self.spec.path}:start")
                if self.is_main:
                    report.phase(Phase.TRAINING)
                self.run()
                self._settle()
                self.process.barrier(f"{self.spec.path}:finish")
            self.finish()
            report.finished()
        except (Exception, SystemExit):
            self._rescue()
            raise
        finally:
            self._mirror.finish()

    @property
    def is_main(self) -> bool:
        """Whether this is process 0."""
        return self.process.index == 0

    @property
    def stop_requested(self) -> Stop | None:
        """The stop that was asked for, if any, the same on every process. Collective: all ask, at the same step."""
        self._wishes.look()
        return self._wishes.stop

    def exit_if_stopped(self) -> None:
        """Leave if the last look (`stop_requested` or `checkpoint_due`) has found a stop; all processes do.

        Raises:
            SystemExit: with the code that says that a stop was obeyed, after everything is saved.
        """
        if self._wishes.stop is not None:
            self._settle()
            self.process.barrier(f"{self.spec.path}:stop")
            report.exit_stopped()

    def log(
        self,
        values: Mapping[str, float],
        *,
        step: int | None = None,
        epoch: float | None = None,
        total_steps: int | None = None,
    ) -> None:
        """Report numbers, and how far it is; process 0's are what is shown, and mirrored to the tracker."""
        if self.is_main:
            report.metrics(values, step=step, epoch=epoch, total_steps=total_steps)
            self._mirror.log(values, step)
            if self.shows_progress:
                self._lines.show(values, step, total_steps)

    def _begin_tracking(self) -> None:
        run_id = self.spec.id
        if self.is_main and self.tracker != NONE:
            self._mirror = tracker_for(self.tracker, directory=self.spec.cluster.status_dir / self.tracker)
            run_id = self._mirror.start(self.spec.name, self.spec.project, plain(self.config), run_id)
        self.spec = replace(self.spec, id=self.process.broadcast(run_id, f"{self.spec.path}:tracking"))

    def hold(self, lock: Lock | None) -> None:
        """From now on, commit nothing without this lock."""

    def _settle(self) -> None:
        """Return when nothing is under way any more."""

    def _rescue(self) -> None:
        """Save what can be saved of what is under way when the work fails."""


def _configured(cls: type[BasicJob[C]], config: C | Mapping[str, Any] | None) -> C:
    kind: type[C] = config_type(cls)
    if isinstance(config, kind) and kind is not dict:
        return config
    return typed(kind, {} if config is None else overlay_of(config))
