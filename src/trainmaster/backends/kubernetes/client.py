"""A client of one Kubernetes cluster: makes the objects of attempts, and follows all of them by one watch a kind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence

from trainmaster.backends.cluster.engine import (
    EngineAwayError,
    EngineJob,
    EngineLaunch,
    EnginePhase,
    EngineRefusedError,
)
from trainmaster.backends.kubernetes import access, manifests, train_jobs
from trainmaster.backends.kubernetes.attempts import Attempts
from trainmaster.backends.kubernetes.connection import (
    TIMEOUT_S,
    KubernetesConnection,
    KubernetesRefusedError,
    Object,
)
from trainmaster.backends.kubernetes.gpus import GpuChoice, choose_gpus, kind_of
from trainmaster.backends.kubernetes.inventory import assumed_nodes, nodes_from
from trainmaster.backends.kubernetes.objects import AttemptObjects
from trainmaster.backends.kubernetes.options import KubernetesOptions
from trainmaster.backends.kubernetes.states import TRAIN_JOB
from trainmaster.backends.kubernetes.trainer import TRAIN_JOBS, Trainer
from trainmaster.backends.kubernetes.views import job_view, train_job_view
from trainmaster.backends.kubernetes.watching import Watches
from trainmaster.protocol.launch import KUBERNETES
from trainmaster.server.core.reports import EngineFacts
from trainmaster.server.core.resources import Node

_PAUSE_S, _PAUSE_PER_JOB_S = 0.05, 0.0001
"""Changes within this time are taken in together: the more jobs there are, the longer it takes."""
_FORBIDDEN = 403


class KubernetesEngine:
    """An attempt is a Job of its name.

    An attempt that asks for a training runtime is a TrainJob instead, where Kubeflow Trainer is installed and can make
    what is asked for.
    """

    kind = KUBERNETES
    node_variable = manifests.NODE_VARIABLE

    def __init__(self, name: str, instance: str, options: KubernetesOptions, *, timeout_s: float = TIMEOUT_S) -> None:
        self._name = name
        self._instance = instance
        self._options = options
        self._api = KubernetesConnection(options, timeout_s=timeout_s)
        self._attempts = Attempts()
        self.foreign = self._trainer = Trainer(self._api, instance)
        self._objects = AttemptObjects(self._api, self._trainer, options, instance)
        self._changed = threading.Event()
        self._watches = Watches(
            name, instance, options, self._api, self._trainer, self._objects, self._attempts, self._changed.set
        )

    def facts(self) -> EngineFacts:
        try:
            version = self._api.get("/version")
            namespace, address = self._api.namespace, self._api.address
            lacking = list(access.missing(self._api, access.NEEDED, namespace))
            self._trainer.look(now=True)
            has_trainer = self._trainer.dialect is not None
            shortcomings = list(access.shortcomings(self._api, namespace, has_trainer=has_trainer))
        except (EngineAwayError, KubernetesRefusedError) as error:
            return EngineFacts(problem=str(error))
        if self._trainer.lacking:
            shortcomings.append(f"there are no TrainJobs, since {access.in_words(self._trainer.lacking, namespace)}")
        return EngineFacts(
            name=f"Kubernetes {version.get('gitVersion', '')}".strip(),
            host="; ".join([f"{address}, namespace {namespace}", *shortcomings]),
            problem=access.in_words(lacking, namespace) if lacking else "",
        )

    def document(self, launch: EngineLaunch) -> str:
        choice, namespace = self._choice(launch), self._options.namespace
        kind, made = self._trainer.object_of(launch, self._options, choice)
        patch = train_jobs.started() if kind == TRAIN_JOBS else manifests.started(self._options)
        return manifests.document(launch, made, patch, namespace=namespace)

    # -- starting --

    def start(self, launch: EngineLaunch, *, is_new: bool = False) -> str:  # noqa: ARG002 - a name is taken once
        choice = self._choice_for(launch)
        if choice.problem:
            raise EngineRefusedError(choice.problem)
        try:
            kind, job = self._objects.make(launch, choice)
        except KubernetesRefusedError as error:
            raise self._refusal(error) from error
        is_train_job = kind == TRAIN_JOBS
        view = train_job_view(job) if is_train_job else job_view(job)
        if view is not None:
            self._attempts.begin(view, lists=(self._watches.train_jobs if is_train_job else self._watches.jobs).lists)
        self._changed.set()
        return f"{TRAIN_JOB}/{launch.name}" if is_train_job else launch.name

    def instead(self, launch: EngineLaunch) -> str:
        if launch.request.launch.kubernetes.runtime is None:
            return ""
        _, made = self._trainer.object_of(launch, self._options, self._choice(launch))
        why = made["metadata"]["annotations"].get(train_jobs.WHY_NOT)
        return f"an Indexed Job, and no TrainJob: {why}" if why else ""

    def _refusal(self, error: KubernetesRefusedError) -> Exception:
        words = access.refusal(error, "job", self._api.namespace)
        return EngineAwayError(words) if access.is_transient(error) else EngineRefusedError(words)

    def _choice_for(self, launch: EngineLaunch) -> GpuChoice:
        """By the nodes as they are now, which a server that has just started has not seen."""
        if launch.needs.gpus:
            with contextlib.suppress(KubernetesRefusedError):
                self._watches.require_nodes()
        return self._choice(launch)

    def _choice(self, launch: EngineLaunch) -> GpuChoice:
        known = [kind_of(node.labels, self._options) for node in self._watches.nodes() if node.gpus]
        return choose_gpus(launch.needs, known, self._options)

    # -- asking --

    def find(self, name: str) -> EngineJob | None:
        job: Object | None
        try:
            job = self._api.get(self._objects.path("jobs", name))
        except KubernetesRefusedError as error:
            if error.code != 404:
                raise EngineAwayError(f"Kubernetes does not show {name}: {error}") from error
            job = self._trainer.find(name)
        if job is None:
            return self._attempts.without_job(name, self._watches.silent())
        view = job_view(job) if job["kind"] == "Job" else train_job_view(job)
        if view is None or (job["metadata"].get("labels") or {}).get(manifests.INSTANCE) != self._instance:
            return None
        return self._attempts.with_job(view, self._watches.silent())

    def jobs(self) -> Mapping[str, EngineJob]:
        self._watches.require()
        for name in self._attempts.broken():
            self._objects.end(TRAIN_JOBS, name, "Foreground")
        return self._attempts.jobs(
            self._watches.silent(), lists=self._watches.jobs.lists, train_job_lists=self._watches.train_jobs.lists
        )

    def wait(self, timeout_s: float) -> None:
        if self._changed.wait(timeout_s):
            time.sleep(_PAUSE_S + _PAUSE_PER_JOB_S * len(self._attempts))
        self._changed.clear()

    def nodes(self) -> Sequence[Node]:
        self._watches.require()
        try:
            self._watches.require_nodes()
        except KubernetesRefusedError as error:
            if error.code == _FORBIDDEN:
                return assumed_nodes(self._name, self._options)
            raise EngineAwayError(f"Kubernetes does not list its nodes: {error}") from error
        return nodes_from(self._name, self._watches.nodes(), self._watches.held(), self._options)

    # -- ending --

    def cancel(self, handle: str) -> None:
        """The Job stays until its pods have ended."""
        kind, name = _parsed(handle)
        self._attempts.cancelled(name)
        self._objects.end(kind, name, "Foreground")
        if (job := self._attempts.get(name)) is not None and job.phase is not EnginePhase.ENDED:
            # Of a Job that was deleted without them.
            for pod in self._attempts.orphans(name):
                self._objects.delete(self._objects.path("pods", pod), "Background")

    def forget(self, handle: str) -> None:
        kind, name = _parsed(handle)
        if kind == TRAIN_JOBS and self._trainer.keeps(name, self._options.keep_train_jobs_s):
            return
        self._objects.end(kind, name, "Background")
        self._attempts.forget(name)

    def close(self) -> None:
        self._watches.close()
        self._api.close()
        self._changed.set()


def _parsed(handle: str) -> tuple[str, str]:
    """The kind and the name of the object that runs an attempt."""
    kind, _, name = handle.rpartition("/")
    return (TRAIN_JOBS if kind == TRAIN_JOB else "jobs"), name
