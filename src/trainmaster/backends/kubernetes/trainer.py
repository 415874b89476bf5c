"""Kubeflow Trainer on a cluster: whether it is there, its training runtimes, and the TrainJobs of others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from trainmaster.backends.cluster.engine import EngineAwayError, EngineLaunch
from trainmaster.backends.kubernetes import access, manifests
from trainmaster.backends.kubernetes.connection import KubernetesConnection, KubernetesRefusedError, Object
from trainmaster.backends.kubernetes.gpus import GpuChoice
from trainmaster.backends.kubernetes.manifests import NODE
from trainmaster.backends.kubernetes.options import KubernetesOptions
from trainmaster.backends.kubernetes.train_jobs import (
    API_VERSION,
    KIND,
    REPLICATED_JOB,
    SCHEMA,
    SET_NAME,
    WHY_NOT,
    Dialect,
    dialect_of,
    inexpressible,
    train_job,
    unsuited,
)
from trainmaster.server.core.foreign_jobs import ForeignJob, ForeignStep, LogPart
from trainmaster.server.core.states import JobStatus

TRAIN_JOBS = "trainjobs"
_LOOK_EVERY_S = 60.0
"""How often it is looked for: it may be installed, or removed, at any time."""
_NOT_ALLOWED, _NOT_FOUND = 403, 404
_INDEX = "batch.kubernetes.io/job-completion-index"
_CLUSTER_KIND, _NAMESPACE_KIND = "ClusterTrainingRuntime", "TrainingRuntime"
_LAUNCHER = "launcher"
_STEPS = ("dataset-initializer", "model-initializer", _LAUNCHER, NODE)
_PHASES = {
    "Pending": JobStatus.QUEUED,
    "Running": JobStatus.TRAINING,
    "Succeeded": JobStatus.COMPLETED,
    "Failed": JobStatus.FAILED,
}
_CONDITIONS = {"Complete": JobStatus.COMPLETED, "Failed": JobStatus.FAILED, "Suspended": JobStatus.PAUSED}
"""Of a TrainJob, the first that holds counts."""
_MOST_LOG_BYTES = 4 << 20
"""Of one answer."""
_PROCESSES = "PET_NPROC_PER_NODE"


class Trainer:
    def __init__(self, api: KubernetesConnection, instance: str) -> None:
        self._api = api
        self._instance = instance
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self.dialect: Dialect | None = None
        """None: Trainer is not installed, or of a version that is not known."""
        self.lacking: list[tuple[access.Rule, str]] = []
        """What the server may not do that TrainJobs need."""
        self._ended_at: dict[str, float] = {}
        """When TrainJobs of ours were first to be removed."""
        self._runtimes: Mapping[tuple[str, str], Object] = {}

    def look(self, *, now: bool = False) -> None:
        """Find out whether it is there, and which runtimes. Raises EngineAwayError."""
        with self._lock:
            if not now and time.monotonic() - self._looked_at < _LOOK_EVERY_S:
                return
            self.dialect = self._dialect()
            self.lacking = self._found_lacking() if self.dialect else []
            self._runtimes = {_identity(each): each for each in self._found_runtimes()} if self.dialect else {}
            self._looked_at = time.monotonic()

    def _dialect(self) -> Dialect | None:
        try:
            document = self._api.get(f"/openapi/v3/apis/{API_VERSION}")
        except KubernetesRefusedError as error:
            if error.code in (_NOT_FOUND, _NOT_ALLOWED):
                return None
            raise EngineAwayError(f"Kubernetes does not say whether Kubeflow Trainer is installed: {error}") from error
        schemas = (document.get("components") or {}).get("schemas") or {}
        return dialect_of(schemas.get(SCHEMA) or {})

    def _found_lacking(self) -> list[tuple[access.Rule, str]]:
        try:
            return list(access.missing(self._api, access.OF_TRAINER, self._api.namespace))
        except KubernetesRefusedError as error:
            raise EngineAwayError(f"Kubernetes does not say what the server may do: {error}") from error

    def path(self, name: str = "") -> str:
        """Of the TrainJobs of the namespace, or of one."""
        return self._namespaced(TRAIN_JOBS, name)

    def _namespaced(self, plural: str, name: str = "") -> str:
        path = f"/apis/{API_VERSION}/namespaces/{quote(self._api.namespace, safe='')}/{plural}"
        return f"{path}/{quote(name, safe='')}" if name else path

    def object_of(self, launch: EngineLaunch, options: KubernetesOptions, gpus: GpuChoice) -> tuple[str, Object]:
        """What runs an attempt, and whether that is one of the jobs or the trainjobs, by what was last seen here."""
        job = manifests.job(launch, options, gpus)
        if launch.request.launch.kubernetes.runtime is None:
            return "jobs", job
        template = job["spec"]["template"]
        if why := self._why_not(launch, template, options):
            job["metadata"]["annotations"][WHY_NOT] = why
            return "jobs", job
        assert self.dialect is not None
        return TRAIN_JOBS, train_job(launch, template, self.dialect)

    def _why_not(self, launch: EngineLaunch, template: Object, options: KubernetesOptions) -> str:
        """Why an attempt that asks for a runtime is to be an Indexed Job all the same."""
        asked = launch.request.launch.kubernetes
        if self.dialect is None:
            return "Kubeflow Trainer is not installed"
        if self.lacking:
            return "the server may not make TrainJobs"
        if options.kueue_queue:
            return "the option kueue_queue is for Indexed Jobs"
        runtime = self._runtimes.get((asked.runtime_kind, asked.runtime or ""))
        if runtime is None:
            return ""  # Kubernetes says what is wrong with it
        return unsuited(runtime) or inexpressible(template, self.dialect)

    def make(self, wanted: Object) -> Object:
        """Make the TrainJob of an attempt, unless it is there, under whatever name."""
        head = wanted["metadata"]
        attempt = head["labels"][manifests.ATTEMPT]
        if (found := self.find(attempt)) is not None:
            return found
        try:
            created: Object = self._api.create(self.path(), wanted)
        except KubernetesRefusedError as error:
            if error.reason != "AlreadyExists":
                raise
            if head["name"] != attempt:
                return self.make({**wanted, "metadata": {**head, "name": attempt}})
            created = self._api.get(self.path(attempt))
        return created

    def find(self, attempt: str) -> Object | None:
        """The TrainJob of an attempt, asked now; None: there is none."""
        self.look()
        if self.dialect is None:
            return None
        selector = f"{manifests.ATTEMPT}={attempt},{manifests.INSTANCE}={self._instance}"
        try:
            items = self._api.get(self.path(), labelSelector=selector)["items"]
        except KubernetesRefusedError as error:
            if error.code in (_NOT_FOUND, _NOT_ALLOWED):
                return None
            raise EngineAwayError(f"Kubernetes does not show the TrainJob of {attempt}: {error}") from error
        # The entries of a list do not say what they are.
        return {**items[0], "apiVersion": API_VERSION, "kind": KIND} if items else None

    def keeps(self, name: str, seconds: float) -> bool:
        """Whether an ended TrainJob stays for a while: clients of Kubeflow still want to see that it is Complete."""
        if time.monotonic() - self._ended_at.setdefault(name, time.monotonic()) < seconds:
            return True
        del self._ended_at[name]
        return False

    # -- runtimes --

    def runtimes(self) -> Sequence[Object]:
        """Those that jobs can name, asked now: of two with a name, that of the namespace."""
        self.look(now=True)
        named = {name: runtime for (_, name), runtime in sorted(self._runtimes.items())}
        return [named[name] for name in sorted(named)]

    def _found_runtimes(self) -> Iterator[Object]:
        for kind, path in (
            (_CLUSTER_KIND, f"/apis/{API_VERSION}/clustertrainingruntimes"),
            (_NAMESPACE_KIND, self._namespaced("trainingruntimes")),
        ):
            try:
                for items, _ in self._api.pages(path):
                    # The entries of a list do not say what they are.
                    yield from ({**each, "apiVersion": API_VERSION, "kind": kind} for each in items)
            except KubernetesRefusedError as error:
                if error.code not in (_NOT_FOUND, _NOT_ALLOWED):
                    raise EngineAwayError(f"Kubernetes does not list training runtimes: {error}") from error

    # -- TrainJobs of others --

    def others(self) -> Sequence[ForeignJob]:
        """The TrainJobs that are not this server's, the newest first."""
        self.look()
        if self.dialect is None:
            return []
        try:
            found = [each for items, _ in self._api.pages(self.path()) for each in items if not self._is_own(each)]
            pods: dict[str, list[Object]] = {}
            if found:
                for items, _ in self._api.pages(self._pods(), labelSelector=SET_NAME):
                    for pod in items:
                        pods.setdefault(pod["metadata"]["labels"][SET_NAME], []).append(pod)
        except KubernetesRefusedError as error:
            raise EngineAwayError(f"Kubernetes does not list TrainJobs: {error}") from error
        found.sort(key=lambda each: each["metadata"]["creationTimestamp"], reverse=True)
        return [self._foreign(each, pods.get(each["metadata"]["name"], [])) for each in found]

    def other(self, name: str) -> ForeignJob | None:
        """One of them, asked now."""
        self.look()
        if self.dialect is None:
            return None
        try:
            found = self._api.get(self.path(name))
            listed = self._api.get(self._pods(), labelSelector=f"{SET_NAME}={name}")["items"]
        except KubernetesRefusedError as error:
            if error.code == _NOT_FOUND:
                return None
            raise EngineAwayError(f"Kubernetes does not show the TrainJob {name}: {error}") from error
        return None if self._is_own(found) else self._foreign(found, listed)

    def log(self, pod: str, step: str, cursor: str) -> LogPart:
        """The lines of a pod of a TrainJob after a cursor; of as many as fit into one answer."""
        container = NODE if step.startswith(f"{NODE}-") else step
        since, _, seen_text = cursor.partition("#")
        seen = int(seen_text) if seen_text.isdigit() else 0
        parameters: dict[str, Any] = {"container": container, "timestamps": "true", "limitBytes": _MOST_LOG_BYTES}
        if since:
            parameters["sinceTime"] = since
        try:
            text = self._api.text(f"{self._pods()}/{quote(pod, safe='')}/log", **parameters)
        except KubernetesRefusedError as error:
            if error.code in (_NOT_FOUND, 400):
                return LogPart(lines=(), cursor=cursor)  # it has not started, or is gone
            raise EngineAwayError(f"Kubernetes does not show the log of {pod}: {error}") from error
        return _new_lines(text, since, seen)

    def _pods(self) -> str:
        return f"/api/v1/namespaces/{quote(self._api.namespace, safe='')}/pods"

    def _is_own(self, train_job: Object) -> bool:
        return (train_job["metadata"].get("labels") or {}).get(manifests.INSTANCE) == self._instance

    def _foreign(self, train_job: Object, pods: Sequence[Object]) -> ForeignJob:
        head, spec = train_job["metadata"], train_job["spec"]
        reference = spec["runtimeRef"]
        runtime = self._runtimes.get((reference.get("kind") or _CLUSTER_KIND, reference["name"])) or {}
        policy = (runtime.get("spec") or {}).get("mlPolicy") or {}
        count = (spec.get("trainer") or {}).get("numNodes") or policy.get("numNodes") or 1
        steps = _steps(pods, shifts="mpi" in policy)
        return ForeignJob(
            name=head["name"],
            status=_status(train_job, steps, count),
            created_at=head["creationTimestamp"],
            node_count=count,
            runtime=reference["name"],
            message=_message(train_job),
            labels=dict(head.get("labels") or {}),
            steps=tuple(steps),
        )


def _identity(runtime: Object) -> tuple[str, str]:
    return runtime["kind"], runtime["metadata"]["name"]


def _status(train_job: Object, steps: Sequence[ForeignStep], count: int) -> JobStatus:
    conditions = {
        each["type"] for each in (train_job.get("status") or {}).get("conditions") or () if each["status"] == "True"
    }
    for condition, status in _CONDITIONS.items():
        if condition in conditions:
            return status
    # A job that goes on says only that it is not suspended any more: its pods know better.
    begun = (JobStatus.TRAINING, JobStatus.COMPLETED)
    started = [each for each in steps if each.name.startswith(f"{NODE}-") and each.status in begun]
    return JobStatus.TRAINING if len(started) >= count else JobStatus.QUEUED


def _message(train_job: Object) -> str:
    for each in (train_job.get("status") or {}).get("conditions") or ():
        if each["type"] == "Failed" and each["status"] == "True":
            return f"{each.get('reason', '')}: {each.get('message', '')}".strip(": ")
    return ""


def _steps(pods: Sequence[Object], *, shifts: bool) -> list[ForeignStep]:
    """Of several pods of a step, the newest is the one that counts. With MPI, the launcher is the first node."""
    newest: dict[tuple[int, int], Object] = {}
    for pod in sorted(pods, key=lambda each: str(each["metadata"]["creationTimestamp"])):
        role = pod["metadata"]["labels"].get(REPLICATED_JOB, "")
        if role in _STEPS:
            newest[_STEPS.index(role), int(pod["metadata"]["labels"].get(_INDEX, 0))] = pod
    found = []
    for (place, index), pod in sorted(newest.items()):
        role = _STEPS[place]
        number = 0 if role == _LAUNCHER else index + shifts
        device, amount = _device(pod, role)
        found.append(
            ForeignStep(
                name=role if place < _STEPS.index(_LAUNCHER) else f"{NODE}-{number}",
                status=_PHASES.get((pod.get("status") or {}).get("phase", ""), JobStatus.QUEUED),
                pod=pod["metadata"]["name"],
                device=device,
                device_count=amount,
            )
        )
    return found


def _device(pod: Object, role: str) -> tuple[str, str]:
    containers = pod["spec"]["containers"]
    names = (NODE,) if role == _LAUNCHER else (role,)
    container = next((each for each in containers if each["name"] in names), containers[0])
    limits = (container.get("resources") or {}).get("limits") or {}
    processes = next((each.get("value") for each in container.get("env") or () if each["name"] == _PROCESSES), "")
    for name, amount in sorted(limits.items(), key=lambda each: each[0] == "cpu"):
        if name == "cpu" or name.endswith(("/gpu", "/tpu")) or "/mig-" in name:
            return name.rpartition("/")[2], processes if processes and processes.isdigit() else str(amount)
    return "", ""


def _new_lines(text: str, since: str, seen: int) -> LogPart:
    """Lines begin with the time, and a log is asked for from a second on: those of a cursor's time come again."""
    lines: list[str] = []
    last, count = since, seen
    at_last = 0
    for line in text.splitlines():
        at, _, message = line.partition(" ")
        if since and at < since:
            continue
        if at == since:
            at_last += 1
            if at_last <= seen:
                continue
        count = count + 1 if at == last else 1
        last = at
        lines.append(message)
    return LogPart(lines=tuple(lines), cursor=f"{last}#{count}" if last else "")
