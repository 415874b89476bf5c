"""A client of one Kubernetes cluster: makes the objects of attempts, and follows all of them by one watch a kind."""

from __future__ import annotations

import contextlib
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
from trainmaster.backends.kubernetes import access, manifests
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
_FORBIDDEN = 403


class KubernetesEngine:
    """An attempt is a Job of its name. It is made suspended, then what it owns, and only then is it marked and let go:
    at every point, what is there tells what is left to do."""

    kind = KUBERNETES
    node_variable = manifests.NODE_VARIABLE

    def __init__(self, name: str, instance: str, options: KubernetesOptions, *, timeout_s: float = TIMEOUT_S) -> None:
        self._name = name
        self._instance = instance
        self._options = options
        self._api = KubernetesConnection(options, timeout_s=timeout_s)
        self._attempts = Attempts()
        self._changed = threading.Event()
        self._sees_all_pods = True
        """Whether it may list the pods of the whole cluster; else only those of its namespace."""
        selector = {"labelSelector": f"{manifests.INSTANCE}={instance}"}
        self._jobs = Follower[JobView](
            self._api, f"jobs of {name}", lambda: (self._path("jobs"), selector), job_view, self._job_changed
        )
        self._pods = Follower[PodView | HeldView](
            self._api, f"pods of {name}", self._where_pods, self._view_of_pod, self._pod_changed
        )
        warnings = {"fieldSelector": "type=Warning"}
        self._events = Follower[EventView](
            self._api, f"events of {name}", lambda: (self._path("events"), warnings), self._view_of_event, self._event
        )
        self._nodes = Follower[NodeView](
            self._api, f"nodes of {name}", lambda: ("/api/v1/nodes", {}), self._view_of_node, self._node_changed
        )
        self._followers: tuple[Follower[Any], ...] = (self._jobs, self._pods, self._events, self._nodes)

    def facts(self) -> EngineFacts:
        try:
            version = self._api.get("/version")
            namespace, address = self._api.namespace, self._api.address
            lacking = list(access.missing(self._api, access.NEEDED, namespace))
            useful = list(access.missing(self._api, access.USEFUL, namespace))
            nodes = list(access.missing(self._api, access.OF_CLUSTER, ""))
        except (EngineAwayError, KubernetesRefusedError) as error:
            return EngineFacts(problem=str(error))
        where = f"{address}, namespace {namespace}"
        if nodes:
            where += f"; nodes are assumed as the option assumed_node says, since {access.in_words(nodes, '')}"
        if useful:
            where += f"; reasons for waiting are incomplete, since {access.in_words(useful, namespace)}"
        return EngineFacts(
            name=f"Kubernetes {version.get('gitVersion', '')}".strip(),
            host=where,
            problem=access.in_words(lacking, namespace) if lacking else "",
        )

    def document(self, launch: EngineLaunch) -> str:
        return manifests.document(launch, self._options, self._choice(launch), namespace=self._options.namespace)

    # -- starting --

    def start(self, launch: EngineLaunch) -> str:
        choice = self._choice_for(launch)
        if choice.problem:
            raise EngineRefusedError(choice.problem)
        wanted = manifests.job(launch, self._options, choice)
        try:
            job = self._made("jobs", wanted)
            if (job["metadata"].get("labels") or {}).get(manifests.INSTANCE) != self._instance:
                raise EngineRefusedError(f"there is a Job {launch.name} of somebody else in the namespace")
            if "deletionTimestamp" in job["metadata"]:
                raise EngineAwayError(f"an earlier Job {launch.name} is still being deleted")
            if not _is_started(job):
                owner = manifests.owner_of(job)
                self._own("secrets", manifests.secret(launch, owner))
                if launch.node_count > 1:
                    self._own("services", manifests.service(launch, owner))
                job = self._api.patch(self._path("jobs", launch.name), manifests.started(self._options))
        except KubernetesRefusedError as error:
            raise self._refusal(error) from error
        view = job_view(job)
        if view is not None:
            self._attempts.begin(view, lists=self._jobs.lists)
        self._changed.set()
        return launch.name

    def _made(self, kind: str, wanted: Object) -> Object:
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
        try:
            job = self._api.get(self._path("jobs", name))
        except KubernetesRefusedError as error:
            if error.code != 404:
                raise EngineAwayError(f"Kubernetes does not show {name}: {error}") from error
            return self._attempts.without_job(name, self._silent())
        view = job_view(job)
        if view is None or (job["metadata"].get("labels") or {}).get(manifests.INSTANCE) != self._instance:
            return None
        return self._attempts.with_job(view, self._silent())

    def jobs(self) -> Mapping[str, EngineJob]:
        self._require()
        return self._attempts.jobs(self._silent(), lists=self._jobs.lists)

    def _require(self) -> None:
        """Raises EngineAwayError unless what is known is of the present."""
        for follower in self._followers:
            follower.start()
        for follower in (self._jobs, self._pods):
            try:
                follower.require(_LIST_S)
            except KubernetesRefusedError as error:
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
        self._attempts.cancelled(handle)
        self._delete(self._path("jobs", handle), "Foreground")
        if (job := self._attempts.get(handle)) is not None and job.phase is not EnginePhase.ENDED:
            # Of a Job that was deleted without them.
            for pod in self._attempts.orphans(handle):
                self._delete(self._path("pods", pod), "Background")

    def forget(self, handle: str) -> None:
        self._delete(self._path("jobs", handle), "Background")
        self._attempts.forget(handle)

    def _delete(self, path: str, propagation: str) -> None:
        try:
            self._api.delete(path, {"propagationPolicy": propagation})
        except KubernetesRefusedError as error:
            if error.code not in (404, 409):
                raise EngineAwayError(f"Kubernetes does not delete {path.rpartition('/')[2]}: {error}") from error

    def close(self) -> None:
        for follower in self._followers:
            follower.close()
        self._api.close()
        self._changed.set()

    # -- following --

    def _path(self, kind: str, name: str = "") -> str:
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
        return self._path("pods"), {"labelSelector": f"{manifests.INSTANCE}={self._instance}"}

    def _view_of_pod(self, pod: Object) -> PodView | HeldView | None:
        head = pod["metadata"]
        labels = head.get("labels") or {}
        if labels.get(manifests.INSTANCE) == self._instance and head["namespace"] == self._api.namespace:
            return pod_view(pod, self._options.gpu_resource)
        return held_view(pod, self._options.gpu_resource)

    def _view_of_event(self, event: Object) -> EventView | None:
        name = (event.get("involvedObject") or {}).get("name", "")
        return event_view(event) if name.startswith(f"tm-{self._instance}-") else None

    def _view_of_node(self, node: Object) -> NodeView:
        return node_view(node, self._options.gpu_resource)

    def _job_changed(self, old: JobView | None, new: JobView | None) -> None:
        self._noted(lambda: self._attempts.job(old, new))

    def _pod_changed(self, old: PodView | HeldView | None, new: PodView | HeldView | None) -> None:
        if isinstance(old, PodView) or isinstance(new, PodView):
            before = old if isinstance(old, PodView) else None
            after = new if isinstance(new, PodView) else None
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


def _is_started(job: Object) -> bool:
    return bool((job["metadata"].get("annotations") or {}).get(manifests.STARTED) == "true")
