"""The objects of attempts on a Kubernetes cluster: makes them, and deletes them."""

from __future__ import annotations

from urllib.parse import quote

from trainmaster.backends.cluster.engine import EngineAwayError, EngineLaunch, EngineRefusedError
from trainmaster.backends.kubernetes import manifests, train_jobs
from trainmaster.backends.kubernetes.connection import KubernetesConnection, KubernetesRefusedError, Object
from trainmaster.backends.kubernetes.gpus import GpuChoice
from trainmaster.backends.kubernetes.options import KubernetesOptions
from trainmaster.backends.kubernetes.trainer import TRAIN_JOBS, Trainer


class AttemptObjects:
    """An attempt is a Job of its name. It is made suspended, then what it owns, and only then is it marked and let go:
    at every point, what is there tells what is left to do."""

    def __init__(self, api: KubernetesConnection, trainer: Trainer, options: KubernetesOptions, instance: str) -> None:
        self._api = api
        self._trainer = trainer
        self._options = options
        self._instance = instance

    def path(self, kind: str, name: str = "") -> str:
        if kind == TRAIN_JOBS:
            return self._trainer.path(name)
        prefix = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
        path = f"{prefix}/namespaces/{quote(self._api.namespace, safe='')}/{kind}"
        return f"{path}/{quote(name, safe='')}" if name else path

    def make(self, launch: EngineLaunch, choice: GpuChoice) -> tuple[str, Object]:
        """What runs an attempt from now on: whether it is one of the jobs or of the trainjobs, and the object. Raises
        KubernetesRefusedError and EngineRefusedError."""
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
            job = self._api.patch(self.path(kind, name), patch)
        return kind, job

    def end(self, kind: str, name: str, propagation: str) -> None:
        """Delete what runs an attempt. A TrainJob may have a name that was another's before."""
        if kind == TRAIN_JOBS:
            if (found := self._trainer.find(name)) is not None:
                head = found["metadata"]
                self.delete(self.path(kind, head["name"]), propagation, uid=head["uid"])
            return
        self.delete(self.path(kind, name), propagation)

    def delete(self, path: str, propagation: str, **preconditions: str) -> None:
        options = {"propagationPolicy": propagation, **({"preconditions": preconditions} if preconditions else {})}
        try:
            self._api.delete(path, options)
        except KubernetesRefusedError as error:
            if error.code not in (404, 409):
                raise EngineAwayError(f"Kubernetes does not delete {path.rpartition('/')[2]}: {error}") from error

    def _wanted(self, launch: EngineLaunch, choice: GpuChoice) -> tuple[str, Object]:
        """The object that runs an attempt, and what it is; not a second one where an earlier answer was lost."""
        if launch.request.launch.kubernetes.runtime is not None:
            self._trainer.look()
            if self._is_there("jobs", launch.name):
                return "jobs", manifests.job(launch, self._options, choice)
        return self._trainer.object_of(launch, self._options, choice)

    def _is_there(self, kind: str, name: str) -> bool:
        try:
            self._api.get(self.path(kind, name))
        except KubernetesRefusedError as error:
            if error.code != 404:
                raise
            return False
        return True

    def _made(self, kind: str, wanted: Object) -> Object:
        if kind == TRAIN_JOBS:
            return self._trainer.make(wanted)
        try:
            created: Object = self._api.create(self.path(kind), wanted)
        except KubernetesRefusedError as error:
            if error.reason != "AlreadyExists":
                raise
            created = self._api.get(self.path(kind, wanted["metadata"]["name"]))
        return created

    def _own(self, kind: str, wanted: Object) -> None:
        """Make what belongs to a Job; what is left of an earlier one of that name is taken over."""
        try:
            self._api.create(self.path(kind), wanted)
        except KubernetesRefusedError as error:
            if error.reason != "AlreadyExists":
                raise
            self._api.patch(self.path(kind, wanted["metadata"]["name"]), wanted)
