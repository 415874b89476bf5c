"""`BasicJob`, a class that runs once on every process with a typed configuration; requests to stop it; the registry."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from types import FrameType
from typing import Any, Generic, Self, TypeVar

from trainmaster.jobs import ambient, report
from trainmaster.jobs.attempt import Stop
from trainmaster.jobs.config_document import config_type, overlay_of, plain, suggestion, typed
from trainmaster.jobs.lock import Lock
from trainmaster.jobs.process import Process, current_process
from trainmaster.jobs.spec import ExecutionSpec
from trainmaster.jobs.tracker import NONE, ProgressLines, tracker_for
from trainmaster.protocol import environment
from trainmaster.protocol.documents import from_json
from trainmaster.protocol.reasons import Phase, StopCause

C = TypeVar("C")
JobT = TypeVar("JobT", bound="BasicJob[Any]")


class _BaseJob(ABC):
    """A callable that every process of a job calls once, at the same time."""

    @abstractmethod
    def __call__(self) -> None:
        pass


class BasicJob(_BaseJob, Generic[C]):
    """A job that runs once on every process; `config` is a `C`, or plain keys and values over the defaults of `C`.

    A class may use the current configuration instead of a given one (see `ambient.py`): it declares its dataclasses by
    a class method `config`, and its `__init__` takes the spec alone.
    """

    tracker: str = NONE
    """The experiment tracker that metrics are mirrored to: `none`, `trackio` or `wandb`."""
    shows_progress: bool = False
    """Whether to print a line of metrics every now and then."""

    def __init__(self, spec: ExecutionSpec, config: C | Mapping[str, Any] | None = None) -> None:
        self.spec = spec
        self._ambient = ambient.current_config() if config is None and ambient.is_ambient(type(self)) else None
        """The configuration that was current when the job was made, and is while it runs; None if one was given."""
        self.args: C = _arguments(type(self), config, self._ambient)
        if not ambient.declares(type(self)):
            self.config: C = self.args
        self.process = current_process()
        self.restored_from: str | None = None
        """The checkpoint of another job that this one started from, if any."""
        self._requests = StopRequests(self.process)
        self._mirror = tracker_for(NONE)
        self._lines = ProgressLines()

    @classmethod
    def local(
        cls,
        root_dir: str | os.PathLike[str],
        name: str = "local",
        project: str | None = None,
        group: str | None = None,
        shard_into: int | None = None,
        config: C | Mapping[str, Any] | None = None,
    ) -> Self:
        """Make the job on this machine, with all files below `root_dir`: for notebooks and tests."""
        spec = ExecutionSpec.local(root_dir, name, project, group, shard_into)
        if config is None and ambient.current_config() is not None and ambient.is_ambient(cls):
            return cls(spec)
        if ambient.declares(cls):
            config = completed_document(cls, {} if config is None else overlay_of(config))
        return make_job(cls, spec, config)

    @property
    def done(self) -> bool:
        """Whether the job is already complete. Process 0 decides for all, before anything runs."""
        return False

    @abstractmethod
    def run(self) -> None:
        """Do the work. Every process calls this."""

    def main_process(self) -> bool:
        """Whether this is process 0. Works before `__init__` was called."""
        return current_process().index == 0

    def finish(self) -> None:
        """Called on every process after everything is saved. Finishes a W&B run that the class itself started."""
        if (wandb := sys.modules.get("wandb")) is not None and wandb.run is not None:
            wandb.finish()

    def __call__(self) -> None:
        """Run the job unless it is done; returns, or exits if it was stopped, when all is saved on all processes."""
        with self._configured():
            self._run_once()

    def _run_once(self) -> None:
        if self.process.broadcast(self.is_main and bool(self.done), f"{self.spec.path}:done"):
            if self.is_main:
                sys.stderr.write(f"trainmaster: {self.spec.path} is complete already\n")
            report.finished()
            return
        self._begin_tracking()
        try:
            with self._requests.signals():
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
        return self.process.index == 0

    @property
    def stop_requested(self) -> Stop | None:
        """The requested stop, if any; the same on every process. Collective: all processes ask at the same step."""
        self._requests.poll()
        return self._requests.stop

    def exit_if_stopped(self) -> None:
        """Exit, when all is saved, if `stop_requested` or `checkpoint_due` last found a stop; all processes do."""
        if self._requests.stop is not None:
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
        """Report metrics and progress. Those of process 0 are shown, and mirrored to the tracker."""
        if self.is_main:
            report.metrics(values, step=step, epoch=epoch, total_steps=total_steps)
            self._mirror.log(values, step)
            if self.shows_progress:
                self._lines.show(values, step, total_steps)

    def _begin_tracking(self) -> None:
        run_id = self.spec.id
        if self.is_main and self.tracker != NONE:
            directory = self.spec.cluster.status_dir / self.tracker
            self._mirror = tracker_for(self.tracker, directory=directory, group=self.spec.group)
            run_id = self._mirror.start(self.spec.name, self.spec.project, self._document(), run_id)
        self.spec = replace(self.spec, id=self.process.broadcast(run_id, f"{self.spec.path}:tracking"))

    def _configured(self) -> AbstractContextManager[None]:
        return nullcontext() if self._ambient is None else ambient.configuration(self._ambient)

    def _document(self) -> dict[str, Any]:
        return ambient.plain_config(self._ambient) if ambient.declares(type(self)) else plain(self.config)

    def hold(self, lock: Lock | None) -> None:
        """Commit nothing without this lock from now on."""

    def _settle(self) -> None:
        """Wait until no save is under way."""

    def _rescue(self) -> None:
        """After an error, save what is still being saved."""


def make_job(cls: type[JobT], spec: ExecutionSpec, config: Any) -> JobT:
    """Construct a job with a configuration, whichever way its class takes it."""
    if not ambient.is_ambient(cls):
        return cls(spec, config)
    with ambient.configuration({} if config is None else overlay_of(config)):
        return cls(spec)


def completed_document(cls: type[BasicJob[Any]], given: Mapping[str, Any]) -> dict[str, Any]:
    """The whole configuration of a class as a plain document; raises ConfigurationError if a value does not fit."""
    if ambient.declares(cls):
        return ambient.completed(ambient.declared(cls), given)
    return plain(typed(config_type(cls), given))


def _arguments(cls: type[BasicJob[C]], config: C | Mapping[str, Any] | None, around: Any) -> C:
    if ambient.declares(cls):
        if around is None:
            raise RuntimeError(f"{cls.__name__} takes its values from a configuration: use `with configuration(...):`")
        found: C = ambient.configure(ambient.declared(cls)[0])
        return found
    kind: type[C] = config_type(cls)
    if isinstance(config, kind) and kind is not dict:
        return config
    given = around if config is None else config
    return typed(kind, {} if given is None else overlay_of(given))


_SIGNALS: Mapping[int, Callable[[int, FrameType | None], Any] | signal.Handlers] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
"""The signals that request a stop, and how Python handles them by default."""


class StopRequests:
    """Requests to save or to stop, by the server or by a signal; the same on every rank, and only changed by `poll`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._signalled = False
        self.stop: Stop | None = None
        """The stop that all ranks agreed on."""

    def poll(self) -> bool:
        """Check for requests, on all ranks; returns whether to save, with or without a stop."""
        if (stop := report.stop_requested()) is None and self._signalled:
            stop = Stop(cause=StopCause.PREEMPT, save=True, deadline=math.inf)
        save = report.save_requested()
        # One message between the ranks in nearly every step; more only when one of them has a request.
        if not self._process.any(stop is not None or save):
            return False
        seen = self._process.gather(json.dumps({"stop": asdict(stop) if stop else None, "save": save}).encode())
        by_rank = [json.loads(each) for each in seen]
        # All follow the first stop that any of them has seen.
        stops, saves = [each["stop"] for each in by_rank if each["stop"]], any(each["save"] for each in by_rank)
        agreed = self._process.broadcast({"stop": stops[:1], "save": saves}, "requests")
        if agreed["stop"]:
            self.stop = from_json(Stop, agreed["stop"][0])
        return bool(agreed["save"] or (self.stop is not None and self.stop.save))

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Treat SIGTERM and Ctrl-C as a request to save and stop while the block lasts. A second signal acts as usual.

        Not inside a job of a server: requests come by the control file there, and SIGTERM ends the process.
        """
        owned = [number for number, default in _SIGNALS.items() if signal.getsignal(number) is default]
        if environment.JOB_ID in os.environ or threading.current_thread() is not threading.main_thread():
            owned = []
        before = {number: signal.signal(number, self._take) for number in owned}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, _frame: object) -> None:
        self._signalled = True
        signal.signal(number, _SIGNALS[number])
        name = signal.Signals(number).name
        sys.stderr.write(
            f"trainmaster: {name}: saving and stopping after this step; a second signal ends the job at once\n"
        )


JobClassT = TypeVar("JobClassT", bound="type[BasicJob[Any]]")

_CLASSES: dict[str, type[BasicJob[Any]]] = {}


class UnknownJobClassError(LookupError):
    def __str__(self) -> str:
        return str(self.args[0])


def job(name: str) -> Callable[[JobClassT], JobClassT]:
    """Register a job class under a name, without a colon, that stays when the class moves to another module."""
    if not name or ":" in name:
        raise ValueError(f"{name!r} is no name for a job class: it is text without a colon")

    def register(cls: JobClassT) -> JobClassT:
        known = _CLASSES.get(name)
        # The same class again is what a module that is loaded twice looks like.
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"job class {name!r} is {known.__module__}:{known.__qualname__} already")
        _CLASSES[name] = cls
        return cls

    return register


def registered() -> tuple[str, ...]:
    return tuple(sorted(_CLASSES))


def name_of(cls: type[BasicJob[Any]]) -> str:
    """The name of a class in checkpoints: its registered name, else `module:Class`."""
    return next((name for name, known in _CLASSES.items() if known is cls), f"{cls.__module__}:{cls.__qualname__}")


def known_class(name: str) -> type[BasicJob[Any]] | None:
    """The loaded class of a registered name or `module:Class`. Nothing is imported because a checkpoint names it."""
    if ":" not in name:
        return _CLASSES.get(name)
    module, _, qualified = name.partition(":")
    return _attribute(sys.modules.get(module), qualified)


def job_class(target: str, *, module: str | None = None) -> type[BasicJob[Any]]:
    """Import the class `module:Class`, or find a registered name after importing `module`."""
    place, _, qualified = target.rpartition(":")
    for name in filter(None, (module, place)):
        _import(name)
    if not place:
        if (known := _CLASSES.get(target)) is not None:
            return known
        message = f"no job class is registered as {target!r}; name it as module:Class, or import what registers it"
        raise UnknownJobClassError(f"{message}; {suggestion(target, registered())}")
    if (found := _attribute(sys.modules[place], qualified)) is None:
        there = [name for name, value in vars(sys.modules[place]).items() if _is_job(value)]
        raise UnknownJobClassError(f"{place} has no job class {qualified!r}; {suggestion(qualified, there)}")
    return found


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # One that the module itself misses is its own error, and is shown as such.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise UnknownJobClassError(
            f"there is no module {name!r} on the path of {sys.executable}; run this in its directory, or install it"
        ) from error


def _attribute(module: Any, qualified: str) -> type[BasicJob[Any]] | None:
    found = module
    for name in qualified.split("."):
        found = getattr(found, name, None)
    return found if _is_job(found) else None


def _is_job(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, BasicJob)
