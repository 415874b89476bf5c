"""What is followed of a Kubernetes cluster: the objects of this server's attempts, what others hold, and the nodes."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainmaster.backends.cluster.engine import EngineAwayError
from trainmaster.backends.kubernetes import access, manifests
from trainmaster.backends.kubernetes.attempts import Attempts
from trainmaster.backends.kubernetes.connection import KubernetesConnection, KubernetesRefusedError, Object
from trainmaster.backends.kubernetes.following import Follower
from trainmaster.backends.kubernetes.objects import AttemptObjects
from trainmaster.backends.kubernetes.options import KubernetesOptions
from trainmaster.backends.kubernetes.train_jobs import REPLICATED_JOB, SET_NAME
from trainmaster.backends.kubernetes.trainer import Trainer
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

_LIST_S = 60.0
"""How long the first lists may take."""
_PING_S = 5.0
"""After so long without a word the API server is asked whether it is there."""
_STOP_S = 2.0
_FORBIDDEN = 403


class Watches:
    """One list and one watch for each kind of object. What happens to attempts is passed on to `attempts`."""

    def __init__(
        self,
        name: str,
        instance: str,
        options: KubernetesOptions,
        api: KubernetesConnection,
        trainer: Trainer,
        objects: AttemptObjects,
        attempts: Attempts,
        on_change: Callable[[], None],
    ) -> None:
        self._instance = instance
        self._options = options
        self._api = api
        self._trainer = trainer
        self._objects = objects
        self._attempts = attempts
        self._on_change = on_change
        self._sees_all_pods = True
        """Whether it may list the pods of the whole cluster; else only those of its namespace."""
        selector = {"labelSelector": f"{manifests.INSTANCE}={instance}"}
        self.jobs = Follower[JobView](
            self._api, f"jobs of {name}", lambda: (self._objects.path("jobs"), selector), job_view, self._job_changed
        )
        self.train_jobs = Follower[JobView](
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
            self._api,
            f"events of {name}",
            lambda: (self._objects.path("events"), warnings),
            self._view_of_event,
            self._event,
        )
        view = functools.partial(node_view, gpu_resource=options.gpu_resource)
        self._nodes = Follower[NodeView](
            self._api, f"nodes of {name}", lambda: ("/api/v1/nodes", {}), view, self._node_changed
        )
        self.followers: tuple[Follower[Any], ...] = (self.jobs, self._pods, self._events, self._nodes)
        """Beside that of TrainJobs."""

    def require(self) -> None:
        """Raises EngineAwayError unless what is known is of the present."""
        self._trainer.look()
        for follower in self.followers:
            follower.start()
        makes = self._trainer.dialect is not None and not self._trainer.lacking
        for follower in (self.jobs, self._pods, *((self.train_jobs,) if makes else ())):
            try:
                follower.require(_LIST_S)
            except KubernetesRefusedError as error:
                if follower is self.train_jobs and error.code == 404:
                    continue  # Trainer has been removed
                words = access.refusal(error, "list", self._api.namespace)
                raise EngineAwayError(words) from error
        if time.monotonic() - self._api.heard_at > _PING_S:
            try:
                self._api.get("/version")
            except KubernetesRefusedError as error:
                raise EngineAwayError(f"the API server does not say its version: {error}") from error

    def close(self) -> None:
        for follower in (*self.followers, self.train_jobs):
            follower.close()
        self._api.interrupt()
        for follower in self.followers:
            follower.join(_STOP_S)

    # -- nodes --

    def require_nodes(self) -> None:
        """Raises EngineAwayError, and KubernetesRefusedError."""
        self._nodes.require(_LIST_S)

    def nodes(self) -> Sequence[NodeView]:
        return self._nodes.snapshot()

    def held(self) -> Mapping[str, Sequence[Amounts]]:
        """What the pods of each node hold."""
        held: defaultdict[str, list[Amounts]] = defaultdict(list)
        for pod in self._pods.snapshot():
            if pod.node and not (isinstance(pod, PodView) and pod.has_ended):
                held[pod.node].append(pod.amounts)
        return held

    def silent(self) -> frozenset[str] | None:
        """The nodes that do not answer; None: the server does not see nodes."""
        if self._nodes.problem is not None:
            return None
        return frozenset(node.name for node in self._nodes.snapshot() if not node.is_ready)

    # -- changes --

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
            return self._objects.path("pods"), {}  # those of TrainJobs do not have our labels
        return self._objects.path("pods"), {"labelSelector": f"{manifests.INSTANCE}={self._instance}"}

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
        self._on_change()
