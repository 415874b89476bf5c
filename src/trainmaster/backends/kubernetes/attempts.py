"""All attempts of a server on a cluster, kept up to date by what its followers tell. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

from trainmaster.backends.cluster.engine import EngineJob
from trainmaster.backends.kubernetes.states import EVICTED, Attempt, engine_job
from trainmaster.backends.kubernetes.views import EventView, JobView, PodView

OF_TRAIN_JOB = "-node-0"
"""What the Job of a TrainJob is called, after its name."""


class Attempts:
    """What an attempt amounts to is worked out anew only when something of it has changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Attempt] = {}
        self._worked_out: dict[str, EngineJob] = {}
        self._dirty: set[str] = set()
        self._begun: dict[str, tuple[JobView, int]] = {}
        """Jobs that this process made and that no watch has shown, and how many lists there were of their kind."""
        self._train_jobs: dict[str, str] = {}
        """What TrainJobs are called -> their attempts."""

    def __len__(self) -> int:
        return len(self._known)

    # -- what happened --

    def begin(self, view: JobView, *, lists: int) -> None:
        """A Job has just been made: it counts until the watch shows it, or a later list does not."""
        with self._lock:
            attempt = self._of(view.name, view.attempt_id)
            self._note_name(view)
            if attempt.job is None or attempt.job.uid != view.uid:
                self._begun[view.name] = (view, lists)
            elif attempt.job.is_started:
                return
            attempt.job, attempt.is_gone, attempt.is_forgotten = view, False, False

    def job(self, old: JobView | None, new: JobView | None) -> None:
        view = new or old
        if view is None:
            return
        with self._lock:
            self._begun.pop(view.name, None)
            attempt = self._of(view.name, view.attempt_id)
            if new is None and attempt.job is not None and attempt.job.uid != view.uid:
                return  # another has taken its place
            known = attempt.job
            if known is not None and known.uid == view.uid and known.is_started and not view.is_started:
                return  # the watch is behind: it shows the Job as it was made
            attempt.job = view
            if new is not None:
                self._note_name(view)
            attempt.is_gone = new is None
            self._drop_if_over(view.name)

    def pod(self, old: PodView | None, new: PodView | None) -> None:
        view = new or old
        if view is None:
            return
        with self._lock:
            attempt = self._of(view.attempt, view.attempt_id)
            last = attempt.pods.get(view.index)
            if last is None or last.uid == view.uid or (not last.has_run and last.created_at <= view.created_at):
                attempt.pods[view.index] = view
            if new is None:
                attempt.living.discard(view.uid)
                if (event := attempt.pod_events.get(view.name)) is not None and event.reason != EVICTED:
                    del attempt.pod_events[view.name]
                self._drop_if_over(view.attempt)
            else:
                attempt.living.add(view.uid)

    def event(self, event: EventView) -> None:
        with self._lock:
            attempt = self._with_job(event.subject)
            if attempt is not None:
                if attempt.event is None or attempt.event.at <= event.at:
                    attempt.event = event
                    self._dirty.add(attempt.name)
                return
            for attempt in self._with_pod(event.subject):
                before = attempt.pod_events.get(event.subject)
                if before is None or (before.at <= event.at and before.reason != EVICTED):
                    attempt.pod_events[event.subject] = event
                    self._dirty.add(attempt.name)

    def node(self, name: str) -> None:
        """A node has come, gone, fallen silent, or answers again."""
        with self._lock:
            for attempt in self._known.values():
                if any(pod.node == name for pod in attempt.pods.values()):
                    self._dirty.add(attempt.name)

    def cancelled(self, name: str) -> None:
        with self._lock:
            if (attempt := self._known.get(name)) is not None:
                attempt.is_cancelled = True
                self._dirty.add(name)

    def forget(self, name: str) -> None:
        """Once the objects of an attempt are gone, too."""
        with self._lock:
            if (attempt := self._known.get(name)) is not None:
                attempt.is_forgotten = True
                self._dirty.add(name)
                self._drop_if_over(name)

    # -- what is known --

    def get(self, name: str) -> EngineJob | None:
        with self._lock:
            return self._worked_out.get(name)

    def has(self, subject: str) -> bool:
        """Whether the name of an object is of an attempt."""
        with self._lock:
            return self._with_job(subject) is not None or bool(self._with_pod(subject))

    def orphans(self, name: str) -> list[str]:
        """The names of pods that are left of a Job that is gone."""
        with self._lock:
            attempt = self._known.get(name)
            if attempt is None or not (attempt.is_gone or attempt.job is None):
                return []
            return [pod.name for pod in attempt.running if not pod.is_deleting]

    def broken(self) -> list[str]:
        """The names of TrainJobs that are to be ended: they would go on without one of their nodes."""
        with self._lock:
            named = (self._known.get(name) for name in self._train_jobs.values())
            return [attempt.name for attempt in named if attempt is not None and attempt.is_broken]

    def jobs(self, silent: frozenset[str] | None, *, lists: int, train_job_lists: int = 0) -> Mapping[str, EngineJob]:
        with self._lock:
            for name, (view, before) in list(self._begun.items()):
                if (train_job_lists if view.is_train_job else lists) > before + 1:
                    # It was made before the last list began, which does not have it.
                    attempt = self._known.get(name)
                    if attempt is not None and attempt.job is not None and attempt.job.uid == view.uid:
                        attempt.is_gone = True
                        self._dirty.add(name)
                    del self._begun[name]
            for name in self._dirty:
                attempt = self._known.get(name)
                if attempt is None or attempt.is_forgotten:
                    self._worked_out.pop(name, None)
                else:
                    attempt.silent = silent
                    self._worked_out[name] = engine_job(attempt)
            self._dirty.clear()
            return dict(self._worked_out)

    def with_job(self, view: JobView, silent: frozenset[str] | None) -> EngineJob:
        """An attempt whose Job was asked for just now."""
        with self._lock:
            attempt = self._known.get(view.name) or Attempt(name=view.name, attempt_id=view.attempt_id)
            return engine_job(replace(attempt, job=view, is_gone=False, silent=silent))

    def without_job(self, name: str, silent: frozenset[str] | None) -> EngineJob | None:
        """An attempt whose Job is not there, asked for just now; None: nothing is known of it."""
        with self._lock:
            attempt = self._known.get(name)
            if attempt is None or attempt.is_forgotten:
                return None
            return engine_job(replace(attempt, is_gone=True, silent=silent))

    def _of(self, name: str, attempt_id: str) -> Attempt:
        self._dirty.add(name)
        attempt = self._known.setdefault(name, Attempt(name=name, attempt_id=attempt_id))
        attempt.attempt_id = attempt.attempt_id or attempt_id  # not every pod tells
        return attempt

    def _note_name(self, view: JobView) -> None:
        if view.is_train_job:
            self._train_jobs[view.train_job] = view.name

    def _with_job(self, subject: str) -> Attempt | None:
        name = subject.removesuffix(OF_TRAIN_JOB)
        return self._known.get(self._train_jobs.get(name, name))

    def _with_pod(self, pod: str) -> list[Attempt]:
        """A pod's name is that of its Job, its index and a random word."""
        attempt = self._with_job(pod.rpartition("-")[0].rpartition("-")[0])
        return [attempt] if attempt is not None else []

    def _drop_if_over(self, name: str) -> None:
        attempt = self._known.get(name)
        if attempt is None or attempt.living:
            return
        if attempt.job is None or (attempt.is_gone and attempt.is_forgotten):
            del self._known[name]
            self._worked_out.pop(name, None)
            if attempt.job is not None and self._train_jobs.get(attempt.job.train_job) == name:
                del self._train_jobs[attempt.job.train_job]
