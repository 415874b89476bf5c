"""What is kept of the objects of a cluster: thousands of them, each with a few of its fields."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainmaster.backends.kubernetes import manifests
from trainmaster.backends.kubernetes.connection import Object
from trainmaster.backends.kubernetes.overlays import WORKER
from trainmaster.backends.kubernetes.train_jobs import SET_NAME
from trainmaster.server.core.resources import quantity

_WORKERS = (WORKER, manifests.NODE)
_INDEX = "batch.kubernetes.io/job-completion-index"
_LONGEST = 1000
"""Of a message: some repeat a whole error page of a registry."""


@dataclass(frozen=True, slots=True)
class Condition:
    is_true: bool
    reason: str = ""
    message: str = ""
    at: float = 0.0


_NONE = Condition(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    name: str
    """Of the attempt."""
    uid: str
    attempt_id: str
    count: int
    """Of its nodes."""
    is_started: bool
    """Whether it was handed over, and is no half of an attempt that a server left behind."""
    is_suspended: bool
    is_deleting: bool
    queue: str
    """Of Kueue."""
    failure: Condition
    """Failed, or about to: its pods are being ended."""
    is_over: bool
    """Complete or Failed, for good."""
    is_train_job: bool = False
    train_job: str = ""
    """What a TrainJob is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """What a pod takes of its node."""

    cpu: float = 0.0
    memory: float = 0.0
    gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldView:
    """A pod of somebody else on a node."""

    node: str
    amounts: Amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A pod of ours."""

    name: str
    uid: str
    attempt: str
    """The name of the attempt on the engine."""
    attempt_id: str
    index: int
    created_at: float
    node: str
    address: str
    phase: str
    reason: str
    message: str
    is_deleting: bool
    is_ready: bool
    """False also where its node does not answer."""
    unscheduled: Condition
    """True: the scheduler found no node."""
    disruption: Condition
    has_run: bool
    """Whether its worker has been started."""
    waits: str
    """Why its container does not run yet."""
    waits_message: str
    exit_code: int | None
    exit_reason: str
    exit_message: str
    ended_at: float
    init_failure: str
    """Which of its init containers failed, and how; empty: none has."""
    memory_limit: str
    amounts: Amounts

    restarts: int = 0
    """How often its container was started again: only a training runtime has Kubernetes do that, and in vain, as the
    attempt has ended with the first. What is said of its end is of the last time."""

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed") or self.restarts > 0

    @property
    def has_failed(self) -> bool:
        return self.has_ended and (self.exit_code != 0 or self.restarts > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView:
    """The last warning about an object of ours, by its reason."""

    subject: str
    reason: str
    message: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    name: str
    address: str
    hostname: str
    labels: Mapping[str, str]
    taints: tuple[Taint, ...]
    is_ready: bool
    why_not: str
    is_cordoned: bool
    cpu: float
    memory: float
    storage: float
    gpus: int
    pods: int


def job_view(job: Object) -> JobView | None:
    head, spec = job["metadata"], job["spec"]
    given = head.get("annotations") or {}
    if manifests.ATTEMPT_ID not in given:
        return None
    conditions = _conditions(job)
    failed = conditions.get("Failed", _NONE)
    return JobView(
        name=head["name"],
        uid=head["uid"],
        attempt_id=given[manifests.ATTEMPT_ID],
        count=int(spec.get("completions") or 1),
        is_started=given.get(manifests.STARTED) == "true",
        is_suspended=bool(spec.get("suspend")),
        is_deleting="deletionTimestamp" in head,
        queue=(head.get("labels") or {}).get(manifests.QUEUE, ""),
        failure=failed if failed.is_true else conditions.get("FailureTarget", _NONE),
        is_over=failed.is_true or conditions.get("Complete", _NONE).is_true,
    )


def train_job_view(train_job: Object) -> JobView | None:
    head, spec = train_job["metadata"], train_job["spec"]
    given = head.get("annotations") or {}
    if manifests.ATTEMPT_ID not in given:
        return None
    conditions = _conditions(train_job)
    failed = conditions.get("Failed", _NONE)
    return JobView(
        name=(head.get("labels") or {}).get(manifests.ATTEMPT, head["name"]),
        uid=head["uid"],
        attempt_id=given[manifests.ATTEMPT_ID],
        count=int(spec["trainer"].get("numNodes") or 1),
        is_started=given.get(manifests.STARTED) == "true",
        is_suspended=bool(spec.get("suspend")),
        is_deleting="deletionTimestamp" in head,
        queue="",
        failure=failed,
        is_over=failed.is_true or conditions.get("Complete", _NONE).is_true,
        is_train_job=True,
        train_job=head["name"],
    )


def pod_view(pod: Object, gpu_resource: str) -> PodView:
    head, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
    labels, given = head.get("labels") or {}, head.get("annotations") or {}
    conditions = _conditions(pod)
    scheduled = conditions.get("PodScheduled", Condition(True))
    container: Object = next((each for each in status.get("containerStatuses") or () if each["name"] in _WORKERS), {})
    restarts = int(container.get("restartCount") or 0)
    # Of containers that have ended the kubelet keeps one: a pod that has ended no longer tells of the time before.
    state = (container.get("lastState") if restarts else None) or container.get("state") or {}
    waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
    if ended.get("reason") == _UNKNOWN and not container.get("containerID"):
        state, ended = {}, {}  # it was never made: the kubelet has to say something of its end
    if not waiting:
        # What holds up an init container holds up the worker.
        every = (each.get("state") or {} for each in status.get("initContainerStatuses") or ())
        waiting = next((each["waiting"] for each in every if "waiting" in each), {}) if not ended else {}
    worker = next((each for each in spec["containers"] if each["name"] in _WORKERS), spec["containers"][0])
    return PodView(
        name=head["name"],
        uid=head["uid"],
        attempt=labels.get(manifests.ATTEMPT) or labels[SET_NAME],
        attempt_id=given.get(manifests.ATTEMPT_ID, ""),
        index=int(given.get(_INDEX) or labels.get(_INDEX) or 0),
        created_at=_time(head.get("creationTimestamp")),
        node=sys.intern(spec.get("nodeName", "")),
        address=status.get("podIP", ""),
        phase=sys.intern(status.get("phase", "Pending")),
        reason=sys.intern(status.get("reason", "")),
        message=_short(status.get("message")),
        is_deleting="deletionTimestamp" in head,
        is_ready=conditions.get("Ready", _NONE).is_true,
        unscheduled=_NONE if scheduled.is_true else Condition(True, scheduled.reason, scheduled.message),
        disruption=conditions.get("DisruptionTarget", _NONE),
        has_run="running" in state or ("terminated" in state and ended.get("reason") not in _NEVER_RAN),
        waits=sys.intern(waiting.get("reason", "")),
        waits_message=_short(waiting.get("message")),
        exit_code=ended.get("exitCode"),
        exit_reason=sys.intern(ended.get("reason", "")),
        exit_message=_short(ended.get("message")),
        ended_at=_time(ended.get("finishedAt")),
        restarts=restarts,
        init_failure=_init_failure(status),
        memory_limit=((worker.get("resources") or {}).get("limits") or {}).get("memory", ""),
        amounts=amounts_of(pod, gpu_resource),
    )


def _init_failure(status: Object) -> str:
    for each in status.get("initContainerStatuses") or ():
        ended = (each.get("state") or {}).get("terminated") or {}
        if ended.get("exitCode"):
            said = f": {_short(ended['message'])}" if ended.get("message") else ""
            return f"{each['name']} ended with exit code {ended['exitCode']}{said}"
    return ""


_UNKNOWN = "ContainerStatusUnknown"
_NEVER_RAN = ("StartError", "ContainerCannotRun")


def held_view(pod: Object, gpu_resource: str) -> HeldView | None:
    """None: it takes nothing of any node."""
    node = pod["spec"].get("nodeName")
    if not node or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return None
    return HeldView(node=sys.intern(node), amounts=amounts_of(pod, gpu_resource))


def amounts_of(pod: Object, gpu_resource: str) -> Amounts:
    """What the scheduler books: that of all containers, or of an init container that needs more."""
    spec = pod["spec"]
    main = [_requests(each) for each in spec.get("containers") or ()]
    before: list[Mapping[str, Any]] = []
    for each in spec.get("initContainers") or ():
        # Those that are restarted run beside the others.
        (main if each.get("restartPolicy") == "Always" else before).append(_requests(each))

    def most(resource: str) -> float:
        asked = sum(quantity(str(each.get(resource, "0"))) for each in main)
        asked = max([asked, *(quantity(str(each.get(resource, "0"))) for each in before)])
        return asked + quantity(str((spec.get("overhead") or {}).get(resource, "0")))

    return Amounts(cpu=most("cpu"), memory=most("memory"), gpus=int(most(gpu_resource)))


def _requests(container: Object) -> Mapping[str, Any]:
    resources = container.get("resources") or {}
    return {**(resources.get("limits") or {}), **(resources.get("requests") or {})}


def event_view(event: Object) -> EventView:
    at = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
    return EventView(
        subject=event["involvedObject"].get("name", ""),
        reason=sys.intern(event.get("reason") or ""),
        message=_short(event.get("message")),
        at=_time(at),
    )


def node_view(node: Object, gpu_resource: str) -> NodeView:
    head, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    there = status.get("allocatable") or status.get("capacity") or {}
    ready = _conditions(node).get("Ready", Condition(False, "", "it has not reported yet"))
    addresses = {each["type"]: each["address"] for each in status.get("addresses") or ()}
    labels = {sys.intern(key): sys.intern(value) for key, value in (head.get("labels") or {}).items()}
    return NodeView(
        name=head["name"],
        address=addresses.get("InternalIP") or addresses.get("ExternalIP") or head["name"],
        hostname=addresses.get("Hostname") or head["name"],
        labels=labels,
        taints=tuple(
            Taint(key=each["key"], value=each.get("value") or "", effect=each["effect"])
            for each in spec.get("taints") or ()
        ),
        is_ready=ready.is_true,
        why_not="" if ready.is_true else ready.message or ready.reason,
        is_cordoned=bool(spec.get("unschedulable")),
        cpu=quantity(str(there.get("cpu", "0"))),
        memory=quantity(str(there.get("memory", "0"))),
        storage=quantity(str(there.get("ephemeral-storage", "0"))),
        gpus=int(quantity(str(there.get(gpu_resource, "0")))),
        pods=int(quantity(str(there.get("pods", "110")))),
    )


def _conditions(obj: Object) -> dict[str, Condition]:
    given: Iterable[Object] = (obj.get("status") or {}).get("conditions") or ()
    return {
        each["type"]: Condition(
            each.get("status") == "True",
            sys.intern(each.get("reason") or ""),
            _short(each.get("message")),
            _time(each.get("lastTransitionTime")),
        )
        for each in given
    }


def _short(message: str | None) -> str:
    text = " ".join((message or "").split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _time(text: str | None) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0
