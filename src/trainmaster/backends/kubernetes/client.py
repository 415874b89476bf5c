"""A client of one Kubernetes cluster: makes the objects of attempts, and follows all of them by one watch a kind."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

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
from trainmaster.backends.kubernetes.following import Follower
from trainmaster.backends.kubernetes.gpus import GpuChoice, choose_gpus, kind_of
from trainmaster.backends.kubernetes.inventory import assumed_nodes, nodes_from
from trainmaster.backends.kubernetes.options import KubernetesOptions
from trainmaster.backends.kubernetes.states import TRAIN_JOB
from trainmaster.backends.kubernetes.train_jobs import REPLICATED_JOB, SET_NAME
from trainmaster.backends.kubernetes.trainer import TRAIN_JOBS, Trainer
from trainmaster.backends.kubernetes.views import (
    Amounts,
    EventView,
    HeldView,
    JobView,
    NodeView,
    PodView,
    event_view,
    held_view,
    job_view,
    node_view,
    pod_view,
    train_job_view,
)
from trainmaster.protocol.launch import KUBERNETES
from trainmaster.server.core.reports import EngineFacts
from trainmaster.server.core.resources import Node

_LIST_S = 60.0
"""How long the first lists may take."""
_PING_S = 5.0
"""After so long without a word the API server is asked whether it is there."""
_PAUSE_S, _PAUSE_PER_JOB_S = 0.05, 0.0001
"""Changes within this time are taken in together: the more jobs there are, the longer it takes."""
_STOP_S = 2.0
_FORBIDDEN = 403


class KubernetesEngine:
    """An attempt is a Job of its name. It is made suspended, then what it owns, and only then is it marked and let go:
    at every point, what is there tells what is left to do.

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
        self._changed = threading.Event()
        self._sees_all_pods = True
        """Whether it may list the pods of the whole cluster; else only those of its namespace."""
        selector = {"labelSelector": f"{manifests.INSTANCE}={instance}"}
        self._jobs = Follower[JobView](
            self._api, f"jobs of {name}", lambda: (self._path("jobs"), selector), job_view, self._job_changed
        )
        self._train_jobs = Follower[JobView](
            self._api,
            f"TrainJobs of {name}",
            lambda: (self._trainer.path(), selector),
            train_job_view,
            self._job_changed,
        )
        self._pods = Follower[PodView | HeldView](
            self._api, f"pods of {name}", self._where_pods, self._view_of_pod, self._pod_changed
        )
        warnings = {"fieldSelector": "type=Warning"}
        self._events = Follower[EventView](
            self._api, f"events of {name}", lambda: (self._path("events"), warnings), self._view_of_event, self._event
        )
        view = functools.partial(node_view, gpu_resource=options.gpu_resource)
        self._nodes = Follower[NodeView](
            self._api, f"nodes of {name}", lambda: ("/api/v1/nodes", {}), view, self._node_changed
        )
        self._followers: tuple[Follower[Any], ...] = (self._jobs, self._pods, self._events, self._nodes)
        """Beside that of TrainJobs."""

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
            kind, wanted = self._wanted(launch, choice)
            job = self._made(kind, wanted)
            if (job["metadata"].get("labels") or {}).get(manifests.INSTANCE) != self._instance:
                raise EngineRefusedError(f"there is a {job['kind']} {launch.name} of somebody else in the namespace")
            name = job["metadata"]["name"]
            if "deletionTimestamp" in job["metadata"]:
                raise EngineAwayError(f"an earlier {job['kind']} {name} is still being deleted")
            if not manifests.is_started(job):
                owner = manifests.owner_of(job)
                self._own("secrets", manifests.secret(launch, owner))
                if manifests.needs_service(launch, job):
                    self._own("services", manifests.service(launch, owner))
                patch = train_jobs.started() if kind == TRAIN_JOBS else manifests.started(self._options)
                job = self._api.patch(self._path(kind, name), patch)
        except KubernetesRefusedError as error:
            raise self._refusal(error) from error
        is_train_job = kind == TRAIN_JOBS
        view = train_job_view(job) if is_train_job else job_view(job)
        if view is not None:
            self._attempts.begin(view, lists=(self._train_jobs if is_train_job else self._jobs).lists)
        self._changed.set()
        return f"{TRAIN_JOB}/{launch.name}" if is_train_job else launch.name

    def _wanted(self, launch: EngineLaunch, choice: GpuChoice) -> tuple[str, Object]:
        """The object that runs an attempt, and what it is; not a second one where an earlier answer was lost."""
        if launch.request.launch.kubernetes.runtime is not None:
            self._trainer.look()
            if self._is_there("jobs", launch.name):
                return "jobs", manifests.job(launch, self._options, choice)
        return self._trainer.object_of(launch, self._options, choice)

    def _is_there(self, kind: str, name: str) -> bool:
        try:
            self._api.get(self._path(kind, name))
        except KubernetesRefusedError as error:
            if error.code != 404:
                raise
            return False
        return True

    def _made(self, kind: str, wanted: Object) -> Object:
        if kind == TRAIN_JOBS:
            return self._trainer.make(wanted)
        try:
            created: Object = self._api.create(self._path(kind), wanted)
        except KubernetesRefusedError as error:
            if error.reason != "AlreadyExists":
                raise
            created = self._api.get(self._path(kind, wanted["metadata"]["name"]))
        return created

    def _own(self, kind: str, wanted: Object) -> None:
        """Make what belongs to a Job; what is left of an earlier one of that name is taken over."""
        try:
            self._api.create(self._path(kind), wanted)
        except KubernetesRefusedError as error:
            if error.reason != "AlreadyExists":
                raise
            self._api.patch(self._path(kind, wanted["metadata"]["name"]), wanted)

    def _refusal(self, error: KubernetesRefusedError) -> Exception:
        words = access.refusal(error, "job", self._api.namespace)
        return EngineAwayError(words) if access.is_transient(error) else EngineRefusedError(words)

    def _choice_for(self, launch: EngineLaunch) -> GpuChoice:
        """By the nodes as they are now, which a server that has just started has not seen."""
        if launch.needs.gpus:
            with contextlib.suppress(KubernetesRefusedError):
                self._nodes.require(_LIST_S)
        return self._choice(launch)

    def _choice(self, launch: EngineLaunch) -> GpuChoice:
        known = [kind_of(node.labels, self._options) for node in self._nodes.snapshot() if node.gpus]
        return choose_gpus(launch.needs, known, self._options)

    # -- asking --

    def find(self, name: str) -> EngineJob | None:
        job: Object | None
        try:
            job = self._api.get(self._path("jobs", name))
        except KubernetesRefusedError as error:
            if error.code != 404:
                raise EngineAwayError(f"Kubernetes does not show {name}: {error}") from error
            job = self._trainer.find(name)
        if job is None:
            return self._attempts.without_job(name, self._silent())
        view = job_view(job) if job["kind"] == "Job" else train_job_view(job)
        if view is None or (job["metadata"].get("labels") or {}).get(manifests.INSTANCE) != self._instance:
            return None
        return self._attempts.with_job(view, self._silent())

    def jobs(self) -> Mapping[str, EngineJob]:
        self._require()
        for name in self._attempts.broken():
            self._end(TRAIN_JOBS, name, "Foreground")
        return self._attempts.jobs(self._silent(), lists=self._jobs.lists, train_job_lists=self._train_jobs.lists)

    def _require(self) -> None:
        """Raises EngineAwayError unless what is known is of the present."""
        self._trainer.look()
        for follower in self._followers:
            follower.start()
        makes = self._trainer.dialect is not None and not self._trainer.lacking
        for follower in (self._jobs, self._pods, *((self._train_jobs,) if makes else ())):
            try:
                follower.require(_LIST_S)
            except KubernetesRefusedError as error:
                if follower is self._train_jobs and error.code == 404:
                    continue  # Trainer has been removed
                words = access.refusal(error, "list", self._api.namespace)
                raise EngineAwayError(words) from error
        if time.monotonic() - self._api.heard_at > _PING_S:
            try:
                self._api.get("/version")
            except KubernetesRefusedError as error:
                raise EngineAwayError(f"the API server does not say its version: {error}") from error

    def wait(self, timeout_s: float) -> None:
        if self._changed.wait(timeout_s):
            time.sleep(_PAUSE_S + _PAUSE_PER_JOB_S * len(self._attempts))
        self._changed.clear()

    def nodes(self) -> Sequence[Node]:
        self._require()
        try:
            self._nodes.require(_LIST_S)
        except KubernetesRefusedError as error:
            if error.code == _FORBIDDEN:
                return assumed_nodes(self._name, self._options)
            raise EngineAwayError(f"Kubernetes does not list its nodes: {error}") from error
        held: defaultdict[str, list[Amounts]] = defaultdict(list)
        for pod in self._pods.snapshot():
            if pod.node and not (isinstance(pod, PodView) and pod.has_ended):
                held[pod.node].append(pod.amounts)
        return nodes_from(self._name, self._nodes.snapshot(), held, self._options)

    # -- ending --

    def cancel(self, handle: str) -> None:
        """The Job stays until its pods have ended."""
        kind, name = _parsed(handle)
        self._attempts.cancelled(name)
        self._end(kind, name, "Foreground")
        if (job := self._attempts.get(name)) is not None and job.phase is not EnginePhase.ENDED:
            # Of a Job that was deleted without them.
            for pod in self._attempts.orphans(name):
                self._delete(self._path("pods", pod), "Background")

    def forget(self, handle: str) -> None:
        kind, name = _parsed(handle)
        if kind == TRAIN_JOBS and self._trainer.keeps(name, self._options.keep_train_jobs_s):
            return
        self._end(kind, name, "Background")
        self._attempts.forget(name)

    def _end(self, kind: str, name: str, propagation: str) -> None:
        """Delete what runs an attempt. A TrainJob may have a name that was another's before."""
        if kind == TRAIN_JOBS:
            if (found := self._trainer.find(name)) is not None:
                head = found["metadata"]
                self._delete(self._path(kind, head["name"]), propagation, uid=head["uid"])
            return
        self._delete(self._path(kind, name), propagation)

    def _delete(self, path: str, propagation: str, **preconditions: str) -> None:
        options = {"propagationPolicy": propagation, **({"preconditions": preconditions} if preconditions else {})}
        try:
            self._api.delete(path, options)
        except KubernetesRefusedError as error:
            if error.code not in (404, 409):
                raise EngineAwayError(f"Kubernetes does not delete {path.rpartition('/')[2]}: {error}") from error

    def close(self) -> None:
        for follower in (*self._followers, self._train_jobs):
            follower.close()
        self._api.interrupt()
        for follower in self._followers:
            follower.join(_STOP_S)
        self._api.close()
        self._changed.set()

    # -- following --

    def _path(self, kind: str, name: str = "") -> str:
        if kind == TRAIN_JOBS:
            return self._trainer.path(name)
        prefix = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
        path = f"{prefix}/namespaces/{quote(self._api.namespace, safe='')}/{kind}"
        return f"{path}/{quote(name, safe='')}" if name else path

    def _where_pods(self) -> tuple[str, Mapping[str, str]]:
        """All of the cluster, to know what others hold; or where that is not allowed, those of this server."""
        if self._sees_all_pods:
            try:
                self._api.get("/api/v1/pods", limit=1)
            except KubernetesRefusedError as error:
                if error.code != _FORBIDDEN:
                    raise
                self._sees_all_pods = False
        if self._sees_all_pods:
            return "/api/v1/pods", {}
        if (dialect := self._trainer.dialect) is not None and not dialect.has_metadata:
            return self._path("pods"), {}  # those of TrainJobs do not have our labels
        return self._path("pods"), {"labelSelector": f"{manifests.INSTANCE}={self._instance}"}

    def _view_of_pod(self, pod: Object) -> PodView | HeldView | None:
        head = pod["metadata"]
        labels = head.get("labels") or {}
        is_own = labels.get(manifests.INSTANCE) == self._instance
        if not is_own and labels.get(REPLICATED_JOB) == manifests.NODE:
            is_own = labels.get(SET_NAME, "").startswith(f"tm-{self._instance}-")
        if is_own and head["namespace"] == self._api.namespace:
            return pod_view(pod, self._options.gpu_resource)
        return held_view(pod, self._options.gpu_resource)

    def _view_of_event(self, event: Object) -> EventView | None:
        name = (event.get("involvedObject") or {}).get("name", "")
        is_own = name.startswith(f"tm-{self._instance}-") or self._attempts.has(name)
        return event_view(event) if is_own else None

    def _job_changed(self, old: JobView | None, new: JobView | None) -> None:
        self._noted(lambda: self._attempts.job(old, new))

    def _pod_changed(self, old: PodView | HeldView | None, new: PodView | HeldView | None) -> None:
        before, after = (each if isinstance(each, PodView) else None for each in (old, new))
        if before is not None or after is not None:
            self._noted(lambda: self._attempts.pod(before, after))

    def _event(self, _: EventView | None, new: EventView | None) -> None:
        # Events expire: what they said stays true until something else happens.
        if new is not None:
            self._noted(lambda: self._attempts.event(new))

    def _node_changed(self, old: NodeView | None, new: NodeView | None) -> None:
        if (old is not None and old.is_ready) != (new is not None and new.is_ready):
            name = (new or old).name  # type: ignore[union-attr]
            self._noted(lambda: self._attempts.node(name))

    def _noted(self, take: Callable[[], None]) -> None:
        take()
        self._changed.set()

    def _silent(self) -> frozenset[str] | None:
        """The nodes that do not answer; None: the server does not see nodes."""
        if self._nodes.problem is not None:
            return None
        return frozenset(node.name for node in self._nodes.snapshot() if not node.is_ready)


def _parsed(handle: str) -> tuple[str, str]:
    """The kind and the name of the object that runs an attempt."""
    kind, _, name = handle.rpartition("/")
    return (TRAIN_JOBS if kind == TRAIN_JOB else "jobs"), name
