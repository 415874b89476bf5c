"""What Kubernetes' words for Jobs and pods mean: the only place that knows its reasons and conditions. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from trainmaster.backends.base import Loss
from trainmaster.backends.cluster import worker_start
from trainmaster.backends.cluster.engine import EngineJob, EnginePhase
from trainmaster.backends.kubernetes.views import EventView, JobView, PodView
from trainmaster.protocol.reasons import Reason

# -- why an attempt waits --

_WAITS: Mapping[str, str] = MappingProxyType({
    "ContainerCreating": "its node prepares its container",
    "PodInitializing": "its init containers run",
    "ErrImagePull": "its image cannot be pulled",
    "ImagePullBackOff": "its image cannot be pulled",
    "RegistryUnavailable": "the registry of its image does not answer",
    "ImageInspectError": "its node cannot read its image",
    "CreateContainerError": "its node cannot make its container",
    "CrashLoopBackOff": "an init container fails again and again",
})  # fmt: skip
"""A container's reason for waiting -> what that means."""

_NEVER: Mapping[str, str] = MappingProxyType({
    "InvalidImageName": "its image has no valid name; change the option image, or the image of the job",
    "ErrImageNeverPull": "its image is not on the node, and is never pulled; change the pull policy or load the image",
    "CreateContainerConfigError": "its container is not configured rightly; change the option pod_template",
})  # fmt: skip
"""Reasons for waiting that time does not remove."""

_IMAGE_MISSING = re.compile(
    r"not found|manifest unknown|name unknown|does not exist|no such manifest|pull access denied|unauthorized"
    r"|authentication required|access forbidden|\b40[134]\b|no match for platform",
    re.IGNORECASE,
)
"""What registries say of an image that no later pull would get."""
_NO_SUCH_IMAGE = (
    "its image cannot be pulled; check its name, and name credentials for its registry with the option "
    "image_pull_secrets"
)
_EVENT_WAITS = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "FailedScheduling")


def never_starts(pod: PodView) -> str:
    """Why a pod will never start as it is; empty: it may."""
    if pod.waits in _NEVER:
        not_heard = (f'secret "{pod.attempt}" not found', "failed to sync")
        if pod.waits == "CreateContainerConfigError" and any(words in pod.waits_message for words in not_heard):
            return ""  # the node has not heard of the Secret yet, or could not ask for it in time
        return _words(_NEVER[pod.waits], pod.waits, pod.waits_message)
    if pod.waits in ("ErrImagePull", "ImagePullBackOff") and _IMAGE_MISSING.search(pod.waits_message):
        return _words(_NO_SUCH_IMAGE, pod.waits, pod.waits_message)
    return ""


def why_it_waits(attempt: Attempt) -> str:
    """Why an attempt has not started on all of its nodes, with the words of Kubernetes."""
    job, pods = attempt.job, [pod for _, pod in sorted(attempt.pods.items()) if not pod.has_ended]
    if not pods:
        if (event := attempt.event) is not None and event.reason == "FailedCreate":
            return f"waits: Kubernetes does not make its pods ({event.reason}: {event.message})"
        if job is not None and job.is_suspended:
            if job.queue:
                return f"waits in the queue {job.queue} of Kueue"
            what = f"trainjob {job.train_job} --type merge" if job.is_train_job else f"job {job.name}"
            patch = '{"spec":{"suspend":false}}'
            return f"waits: somebody suspended it; `kubectl patch {what} -p '{patch}'` lets it start"
        return "waits for its pods"
    waiting = [pod for pod in pods if not pod.has_run]
    count = job.count if job is not None else len(pods)
    first = next((pod for pod in waiting if pod.unscheduled.is_true), waiting[0] if waiting else None)
    begun = sum(pod.has_run for pod in attempt.pods.values())
    so_far = f"{begun} of {count} pods have started; " if begun else ""
    return so_far + (_why_pod_waits(first, attempt.pod_events) if first is not None else "waits for its other pods")


def _why_pod_waits(pod: PodView, events: Mapping[str, EventView]) -> str:
    if never := never_starts(pod):
        return f"cannot start as it is: {never}"
    if pod.unscheduled.is_true:
        return _words("waits", pod.unscheduled.reason, pod.unscheduled.message)
    event = events.get(pod.name)
    if pod.waits in ("", "ContainerCreating", "PodInitializing") and event and event.reason in _EVENT_WAITS:
        return _words("waits: its node cannot prepare its container", event.reason, event.message)
    if pod.waits:
        return _words(f"waits: {_WAITS.get(pod.waits, 'its container does not run')}", pod.waits, pod.waits_message)
    return f"waits: {pod.node} takes it over" if pod.node else "waits for the scheduler"


def _words(text: str, reason: str, message: str) -> str:
    """
    >>> _words("waits", "Unschedulable", "0/2 nodes are available."), _words("waits", "Busy", "")
    ('waits (Unschedulable: 0/2 nodes are available.)', 'waits (Busy)')
    """
    return f"{text} ({reason}: {message})" if message else f"{text} ({reason})" if reason else text


# -- why an attempt ended --

_DISRUPTIONS: Mapping[str, tuple[Reason, str]] = MappingProxyType({
    "PreemptionByScheduler": (Reason.PREEMPTED, "Kubernetes gave its node to a pod of a higher priority"),
    "DeletionByTaintManager": (Reason.EVICTED, "its node was given a taint that it does not tolerate"),
    "EvictionByEvictionAPI": (Reason.EVICTED, "it was evicted from its node, as by `kubectl drain`"),
    "TerminationByKubelet": (Reason.EVICTED, "its node ended it, because it ran out of a resource or was shut down"),
    "DeletionByPodGC": (Reason.NODE_LOST, "its node is gone"),
})  # fmt: skip
"""The reason of a pod's condition DisruptionTarget -> what that means."""

_POD_REASONS: Mapping[str, tuple[Reason, str]] = MappingProxyType({
    "Evicted": (Reason.EVICTED, "its node ran out of a resource"),
    "Preempting": (Reason.PREEMPTED, "its node gave its place to a critical pod"),
    "NodeLost": (Reason.NODE_LOST, "its node was lost"),
    "NodeShutdown": (Reason.EVICTED, "its node was shut down"),
    "Terminated": (Reason.EVICTED, "its node was shut down"),
    "Shutdown": (Reason.EVICTED, "its node was shut down"),
    "DeadlineExceeded": (Reason.TIMEOUT, "it reached its time limit on Kubernetes"),
    "NodeAffinity": (Reason.ENGINE_UNAVAILABLE, "its node no longer has the labels that it needs"),
    "UnexpectedAdmissionError": (Reason.ENGINE_UNAVAILABLE, "its node did not admit it"),
})  # fmt: skip
"""The reason of a pod's status -> what that means. `OutOfcpu` and the like are of nodes that were full after all."""

_NO_WORKER = (
    "its image cannot start a worker: jobs that run Python need an image with `sh` and Python 3.11 or newer, and other "
    "jobs need the option image of the cluster"
)
_EXITS: Mapping[str, tuple[Reason, str]] = MappingProxyType({
    "OOMKilled": (Reason.OUT_OF_MEMORY, "it used more memory than it may"),
    "StartError": (Reason.LAUNCH_REFUSED, _NO_WORKER),
    "ContainerCannotRun": (Reason.LAUNCH_REFUSED, _NO_WORKER),
    "ContainerStatusUnknown": (Reason.NODE_LOST, "its node no longer knows what became of it"),
    "DeadlineExceeded": (Reason.TIMEOUT, "it reached its time limit on Kubernetes"),
})  # fmt: skip
"""The reason with which a container ended -> what that means."""

_DEADLINE = "DeadlineExceeded"  # also of a Job; of its other failures, its pods say more
EVICTED = "Evicted"
"""Also of the event, which alone tells of it where the pod exits 0 and has succeeded."""
_OVER_ITS_STORAGE = re.compile(r"local (ephemeral )?storage (usage|limit)|EmptyDir volume")
"""What the kubelet says of a pod that it evicts for what that pod has written, and not for want of a resource."""
_WROTE_TOO_MUCH = (
    "it wrote more to the disk of its node than it may; ask for more with storage_min_mb, or for a larger volume if "
    "Kubernetes names one"
)

_KILLED = 137
_NODE_SILENT = "its node does not answer any more"


def loss_of(pod: PodView, silent: frozenset[str] | None = None) -> Loss | None:
    """Why a pod ended, or is being ended, if Kubernetes says so; None: its worker knows best. `silent`: see Attempt."""
    if pod.exit_reason == "OOMKilled":
        limit = f", {pod.memory_limit}" if pod.memory_limit else ""
        reason, meaning = _EXITS["OOMKilled"]
        return Loss(reason=reason, message=_words(f"{meaning}{limit}", "OOMKilled", f"exit code {pod.exit_code}"))
    if pod.disruption.is_true:
        condition = pod.disruption
        reason, meaning = _DISRUPTIONS.get(condition.reason, (Reason.EVICTED, "Kubernetes disrupted it"))
        if condition.reason == "DeletionByTaintManager" and _is_lost(pod, silent):
            reason, meaning = Reason.NODE_LOST, _NODE_SILENT
        detail = pod.message if pod.reason == EVICTED else condition.message
        return Loss(reason=reason, message=_of_node(pod, _words(meaning, condition.reason, detail)))
    if pod.reason == EVICTED:
        return _evicted(pod, pod.message)
    known = _POD_REASONS.get(pod.reason)
    if known is None and pod.reason.startswith("OutOf"):
        known = (Reason.ENGINE_UNAVAILABLE, "its node was full after all")
    if known is not None:
        return Loss(reason=known[0], message=_of_node(pod, _words(known[1], pod.reason, pod.message)))
    if pod.init_failure and pod.has_ended and not pod.is_deleting:
        return Loss(reason=Reason.LAUNCH_REFUSED, message=f"its init container {pod.init_failure}")
    if pod.exit_reason in _EXITS:
        reason, meaning = _EXITS[pod.exit_reason]
        return Loss(reason=reason, message=_words(meaning, pod.exit_reason, pod.exit_message))
    if pod.exit_code is not None and pod.exit_code in worker_start.MESSAGES:
        message = worker_start.MESSAGES[pod.exit_code]
        return Loss(reason=worker_start.REASONS[pod.exit_code], message=f"{message} (exit code {pod.exit_code})")
    return None


def _evicted(pod: PodView, message: str) -> Loss:
    known = (Reason.DISK_FULL, _WROTE_TOO_MUCH) if _OVER_ITS_STORAGE.search(message) else _POD_REASONS[EVICTED]
    return Loss(reason=known[0], message=_of_node(pod, _words(known[1], EVICTED, message)))


def _is_lost(pod: PodView, silent: frozenset[str] | None) -> bool:
    """Whether its node does not answer: then nobody will hear of the end of its container."""
    if pod.has_ended:
        return False
    return not pod.is_ready if silent is None else pod.node in silent


def _of_node(pod: PodView, text: str) -> str:
    return f"{text}, on {pod.node}" if pod.node else text


def _plain_loss(pod: PodView) -> Loss:
    """Of a pod of which Kubernetes says nothing but how it ended."""
    if pod.exit_code == 0:
        text = "its worker ended and did not report how"
    elif pod.exit_code is None and pod.is_deleting:
        return Loss(reason=Reason.ENGINE_CANCELLED, message=_of_node(pod, _POD_DELETED))
    elif pod.exit_code is None:
        text = _words("its pod ended and Kubernetes does not say how", pod.reason, pod.message)
    else:
        hint = ", as when its node is out of memory" if pod.exit_code == _KILLED else ""
        text = f"its worker ended with exit code {pod.exit_code}{hint} and did not report how"
    return Loss(reason=Reason.WORKER_LOST, message=_of_node(pod, text))


# -- attempts --

TRAIN_JOB = "trainjob"
"""Precedes the name of an attempt that is no Job."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """All that is known of one attempt: its objects, the last ones that there were included."""

    name: str
    attempt_id: str
    job: JobView | None = None
    """The last; None: this server has not seen it."""
    is_gone: bool = False
    """Whether the Job has been deleted."""
    is_cancelled: bool = False
    """By this server."""
    is_forgotten: bool = False
    """Whether nobody asks for it any more."""
    pods: dict[int, PodView] = field(default_factory=dict)
    """The pod of each node: the first that has run, as another can only be turned away; else the last."""
    living: set[str] = field(default_factory=set)
    """The uids of pods that are there."""
    event: EventView | None = None
    """The last warning about the Job."""
    pod_events: dict[str, EventView] = field(default_factory=dict)
    """The last warning about each pod."""
    silent: frozenset[str] | None = None
    """The nodes that do not answer; None: the server may not see nodes."""

    @property
    def handle(self) -> str:
        return f"{TRAIN_JOB}/{self.name}" if self.job is not None and self.job.is_train_job else self.name

    @property
    def is_broken(self) -> bool:
        """Whether it has ended on a node, and Kubernetes would have the others run on, or start that one again."""
        job = self.job
        if job is None or not job.is_train_job or self.is_gone or job.is_deleting or job.is_over:
            return False
        return any(pod.has_failed for pod in self.pods.values())

    @property
    def running(self) -> list[PodView]:
        """Pods that hold something of a node, or may."""
        return [pod for pod in self.pods.values() if pod.uid in self.living and not pod.has_ended]


_SUSPENDED = "somebody suspended it on Kubernetes"
_DELETED = "somebody deleted it on Kubernetes"
_POD_DELETED = "somebody deleted its pod on Kubernetes"
_CANCELLED = "it was withdrawn"
_KUEUE = "Kueue gave its quota to another"


def engine_job(attempt: Attempt) -> EngineJob:
    """Where an attempt stands."""
    job, pods = attempt.job, attempt.pods
    losses = {index: loss for index, pod in sorted(pods.items()) if (loss := _loss_in(attempt, pod)) is not None}
    loss = _cause(attempt, losses)
    phase = _phase(attempt)
    if phase is EnginePhase.ENDED:
        if loss is None:
            loss = _never(attempt) or _first_plain(attempt)
        message = loss.message
    elif phase is EnginePhase.QUEUED:
        message = why_it_waits(attempt)
    else:
        message = loss.message if loss is not None else ""
    gone = {index: each for index, each in losses.items() if _is_node_gone(attempt, pods[index])}
    return EngineJob(
        attempt_id=attempt.attempt_id,
        handle=attempt.handle,
        phase=phase,
        message=message,
        loss=loss,
        node_losses=gone if job is not None and phase is not EnginePhase.PREPARING else {},
        addresses={index: pod.address for index, pod in sorted(pods.items()) if pod.address},
    )


def _phase(attempt: Attempt) -> EnginePhase:
    job, running = attempt.job, attempt.running
    if attempt.is_gone:
        return EnginePhase.RUNNING if running else EnginePhase.ENDED
    if job is None:
        return EnginePhase.RUNNING  # its pods are known, and it will be
    if not job.is_started:
        return EnginePhase.PREPARING
    if job.is_over and not running:
        return EnginePhase.ENDED
    has_run = [pod for pod in attempt.pods.values() if pod.has_run]
    if job.is_deleting or job.failure.is_true:
        return EnginePhase.RUNNING
    if job.is_suspended and not running:
        return EnginePhase.ENDED if has_run else EnginePhase.QUEUED
    if _never(attempt) is not None:
        return EnginePhase.ENDED
    return EnginePhase.RUNNING if len(has_run) >= job.count else EnginePhase.QUEUED


def _never(attempt: Attempt) -> Loss | None:
    """Why an attempt that has not started anywhere never will."""
    if any(pod.has_run for pod in attempt.pods.values()):
        return None
    for pod in attempt.pods.values():
        if words := never_starts(pod):
            return Loss(reason=Reason.LAUNCH_REFUSED, message=words)
    return None


def _cause(attempt: Attempt, losses: Mapping[int, Loss]) -> Loss | None:
    """Why all of it ends or has ended; None as long as nothing says so."""
    job = attempt.job
    if job is not None and job.failure.is_true and job.failure.reason == _DEADLINE:
        reason, meaning = _EXITS[_DEADLINE]
        return Loss(reason=reason, message=_words(meaning, _DEADLINE, job.failure.message))
    if losses:
        return losses[_first([attempt.pods[index] for index in losses]).index]
    if any(pod.restarts for pod in attempt.pods.values()):
        return _first_plain(attempt)
    if attempt.is_cancelled:
        return Loss(reason=Reason.ENGINE_CANCELLED, message=_CANCELLED)
    if attempt.is_gone or (job is not None and job.is_deleting):
        return Loss(reason=Reason.ENGINE_CANCELLED, message=_DELETED)
    if job is not None and job.is_started and job.is_suspended and any(pod.has_run for pod in attempt.pods.values()):
        if job.queue:
            return Loss(reason=Reason.PREEMPTED, message=_KUEUE)
        return Loss(reason=Reason.ENGINE_CANCELLED, message=_SUSPENDED)
    if job is not None and job.failure.is_true:
        return _first_plain(attempt)
    if any(pod.is_deleting for pod in attempt.pods.values()) and not (job is not None and job.is_over):
        if _fails(attempt):
            return _first_plain(attempt)
        return Loss(reason=Reason.ENGINE_CANCELLED, message=_POD_DELETED)
    return None


def _loss_in(attempt: Attempt, pod: PodView) -> Loss | None:
    if (loss := loss_of(pod, attempt.silent)) is not None:
        return loss
    if (event := attempt.pod_events.get(pod.name)) is not None and event.reason == EVICTED:
        return _evicted(pod, event.message)
    job = attempt.job
    is_ending = attempt.is_gone or attempt.is_cancelled or job is None or _fails(attempt)
    if is_ending or (job is not None and (job.is_deleting or job.is_suspended or job.failure.is_true or job.is_over)):
        return None
    if pod.has_run and not pod.has_ended and pod.uid not in attempt.living:
        return Loss(reason=Reason.ENGINE_CANCELLED, message=_of_node(pod, _POD_DELETED))
    return None


def _fails(attempt: Attempt) -> bool:
    """Whether a pod has failed by itself, and its Job therefore fails: the Job controller deletes the other pods before
    it says so."""
    return any(pod.has_failed and not pod.is_deleting for pod in attempt.pods.values())


def _first_plain(attempt: Attempt) -> Loss:
    bad = [pod for pod in attempt.pods.values() if pod.has_failed]
    if bad:
        return _plain_loss(_first(bad))
    job = attempt.job
    if job is not None and job.failure.is_true:
        message = _words("it failed on Kubernetes", job.failure.reason, job.failure.message)
        return Loss(reason=_reason_in(job.failure.message), message=message)
    return Loss(reason=Reason.WORKER_LOST, message="its worker ended on Kubernetes without a report")


def _reason_in(message: str) -> Reason:
    """Where the pods are gone, the Job says why they failed."""
    return Reason.EVICTED if "DisruptionTarget" in message else Reason.WORKER_LOST


def _first(pods: Sequence[PodView]) -> PodView:
    """The one that ended first, as far as that is known: the others follow it."""
    return min(pods, key=lambda pod: (pod.disruption.at or pod.ended_at or float("inf"), pod.index))


def _is_node_gone(attempt: Attempt, pod: PodView) -> bool:
    """Whether nothing runs there any more, as far as Kubernetes will ever know."""
    if pod.uid not in attempt.living or pod.has_ended:
        return True
    return pod.disruption.is_true and pod.is_deleting and _is_lost(pod, attempt.silent)
