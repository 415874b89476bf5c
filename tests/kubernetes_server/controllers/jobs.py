"""The Job controller."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kubernetes_server.controllers import job_rules as rules
from kubernetes_server.controllers.job_pods import new_pod
from kubernetes_server.controllers.loop import Controller
from kubernetes_server.deletion import DeleteOptions
from kubernetes_server.kinds.jobs import TRACKING
from kubernetes_server.objects import (
    Key,
    Object,
    age_s,
    clone,
    condition_of,
    controller_of,
    has_condition,
    is_deleting,
    key_of,
    set_condition,
    timestamp,
)
from kubernetes_server.resources import JOBS, PODS
from kubernetes_server.statuses import StatusError
from kubernetes_server.store import Change

if TYPE_CHECKING:
    from kubernetes_server.cluster import Cluster

_COMPONENT = "job-controller"
_NAME = "kubernetes.io/job-controller"
LARGE = 200
"""With more pods at a time, a job is looked at a few times a second, not after every change."""
MOST_AT_ONCE = 250
"""Pods that one look at a job makes (500 of the real one), since meanwhile nobody else has a turn."""


class JobController(Controller):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._failures: dict[str, tuple[int, float]] = {}
        """By job uid: failures in a row, and when (by the loop's clock) the next pod may be made."""
        self.store.subscribe(JOBS.store_key, self.enqueue_change)
        self.store.subscribe(PODS.store_key, self._pod_changed)

    def _pod_changed(self, change: Change) -> None:
        owner = controller_of(change.record.object)
        if owner and owner["kind"] == "Job":
            key = (change.record.key[0], owner["name"])
            job = self.store.get(JOBS.store_key, key)
            if job is not None and job["spec"]["parallelism"] > LARGE:
                self.enqueue_soon(key, 0.2)
            else:
                self.enqueue(key)
            if change.kind != "DELETED" and self.store.with_uid(owner["uid"]) is None:
                self._release(change.record.object)

    def sync(self, key: Key) -> None:
        job = self.store.get(JOBS.store_key, key)
        if (
            job is None
            or job["spec"].get("managedBy", "kubernetes.io/job-controller") != "kubernetes.io/job-controller"
        ):
            return
        pods = self._pods(job)
        if has_condition(job, "Complete") or has_condition(job, "Failed"):
            for pod in pods:
                self._release(pod)
            self._delete_when_old(job)
            return
        Sync(self, job, pods).run()

    def _pods(self, job: Object) -> list[Object]:
        records = self.store.dependents(job["metadata"]["uid"])
        pods = [record.object for record in records if record.store_key == PODS.store_key]
        return sorted(pods, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))

    def _release(self, pod: Object) -> None:
        """Let a pod go that has been counted."""
        if rules.is_tracked(pod):

            def release(pod: Object) -> None:
                pod["metadata"]["finalizers"] = [each for each in pod["metadata"]["finalizers"] if each != TRACKING]

            self.operations.modify(PODS, key_of(pod), release)

    def _delete_when_old(self, job: Object) -> None:
        ttl_s = job["spec"].get("ttlSecondsAfterFinished")
        if ttl_s is None or is_deleting(job):
            return
        ended = condition_of(job, "Complete") or condition_of(job, "Failed")
        assert ended is not None
        left_s = ttl_s - age_s(ended["lastTransitionTime"])
        if left_s > 0:
            self.enqueue_after(key_of(job), left_s)
        else:
            self.operations.deletion.delete(JOBS, key_of(job), DeleteOptions(propagation="Foreground"))

    # -- failures in a row --

    def note_failures(self, job: Object, count: int) -> None:
        timing = self.cluster.settings.timing
        before, _ = self._failures.get(job["metadata"]["uid"], (0, 0.0))
        in_a_row = before + count
        delay_s = min(timing.job_backoff_s * 2 ** (in_a_row - 1), timing.job_backoff_limit_s)
        self._failures[job["metadata"]["uid"]] = (in_a_row, self.cluster.time() + delay_s)

    def note_success(self, job: Object) -> None:
        self._failures.pop(job["metadata"]["uid"], None)

    def backoff_s(self, job: Object) -> float:
        _, until = self._failures.get(job["metadata"]["uid"], (0, 0.0))
        return max(until - self.cluster.time(), 0.0)


class Sync:
    """One look at a job and its pods, and what follows from it."""

    def __init__(self, controller: JobController, job: Object, pods: list[Object]) -> None:
        self._controller = controller
        self._operations = controller.operations
        self._old = job
        self._job = clone(job)
        self._pods = pods
        self._status: Object = self._job.setdefault("status", {})
        self._conditions: list[Object] = self._status.setdefault("conditions", [])

    def run(self) -> None:
        spec = self._job["spec"]
        suspended = bool(spec["suspend"])
        if "startTime" not in self._status and not suspended:
            self._status["startTime"] = timestamp()
        counted = self._count()
        if failure := self._failure():
            set_condition(self._conditions, "FailureTarget", "True", reason=failure[0], message=failure[1])
        target = condition_of(self._job, "FailureTarget") or condition_of(self._job, "SuccessCriteriaMet")
        if target is None and not is_deleting(self._job):
            self._manage(suspended)
            if self._is_complete():
                text = "Reached expected number of succeeded pods"
                set_condition(self._conditions, "SuccessCriteriaMet", "True", reason="CompletionsReached", message=text)
                self._controller.enqueue(key_of(self._job))
        if target is not None:
            # Before anybody can see that the job is about to end.
            self._delete_active()
        self._store()
        # Only after the counts are stored may the pods go.
        for pod in counted:
            self._controller._release(pod)
        if target is not None:
            self._end(target)

    # -- counting --

    def _count(self) -> list[Object]:
        """Count the pods that have ended since the last time; returns them."""
        job, status = self._job, self._status
        indexes = rules.parse_indexes(status.get("completedIndexes", ""))
        counted = []
        failures = 0
        target = condition_of(job, "FailureTarget")
        for pod in self._pods:
            if not rules.is_tracked(pod):
                continue
            if pod["status"].get("phase") == "Succeeded":
                if rules.is_indexed(job):
                    if 0 <= rules.index_of(pod) < job["spec"]["completions"]:
                        indexes.add(rules.index_of(pod))
                else:
                    status["succeeded"] = status.get("succeeded", 0) + 1
                self._controller.note_success(job)
            elif rules.has_failed(job, pod) or (target and is_deleting(pod)):
                action, why = rules.policy_verdict(job, pod)
                if action == "FailJob" and target is None:
                    set_condition(self._conditions, "FailureTarget", "True", reason="PodFailurePolicy", message=why)
                if action != "Ignore":
                    failures += 1
            elif not is_deleting(job):
                continue  # those of a job that is being deleted go, whatever they do
            counted.append(pod)
        if failures:
            status["failed"] = status.get("failed", 0) + failures
            self._controller.note_failures(job, failures)
        if rules.is_indexed(job) and indexes:
            status["completedIndexes"] = rules.format_indexes(indexes)
            status["succeeded"] = len(indexes)
        return counted

    def _failure(self) -> tuple[str, str] | None:
        """The reason and the message with which the job fails now."""
        job, spec = self._job, self._job["spec"]
        if condition_of(job, "FailureTarget") or condition_of(job, "SuccessCriteriaMet"):
            return None
        if self._status.get("failed", 0) > spec["backoffLimit"] or rules.is_past_backoff_limit_on_failure(
            job, self._pods
        ):
            return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        deadline_s = spec.get("activeDeadlineSeconds")
        if deadline_s is not None and not spec["suspend"]:
            left_s = deadline_s - age_s(self._status["startTime"])
            if left_s <= 0:
                return "DeadlineExceeded", "Job was active longer than specified deadline"
            self._controller.enqueue_after(key_of(job), left_s)
        return None

    def _is_complete(self) -> bool:
        completions = self._job["spec"].get("completions")
        succeeded = self._status.get("succeeded", 0)
        enough = succeeded > 0 if completions is None else succeeded >= completions
        return enough and not any(rules.is_active(pod) for pod in self._pods)

    # -- pods --

    def _manage(self, suspended: bool) -> None:
        spec = self._job["spec"]
        active = [pod for pod in self._pods if rules.is_active(pod)]
        succeeded = self._status.get("succeeded", 0)
        if suspended:
            self._delete_pods(active)
            if set_condition(self._conditions, "Suspended", "True", reason="JobSuspended", message="Job suspended"):
                self._event("Suspended", "Job suspended")
            return
        if has_condition(self._job, "Suspended"):
            set_condition(self._conditions, "Suspended", "False", reason="JobResumed", message="Job resumed")
            self._event("Resumed", "Job resumed")
            self._status["startTime"] = timestamp()
        if spec.get("completions") is None:
            wanted = len(active) if succeeded else spec["parallelism"]
        else:
            wanted = max(min(spec["completions"] - succeeded, spec["parallelism"]), 0)
        if len(active) > wanted:
            # The youngest, and of an Indexed job the highest.
            active.sort(key=lambda pod: (rules.is_ready(pod), -rules.index_of(pod)))
            self._delete_pods(active[: len(active) - wanted])
            return
        waiting = [pod for pod in self._pods if rules.is_terminating(pod)] if rules.waits_for_ends(self._job) else []
        missing = wanted - len(active) - len(waiting)
        if missing <= 0:
            return
        if (backoff_s := self._controller.backoff_s(self._job)) > 0:
            self._controller.enqueue_after(key_of(self._job), backoff_s)
            return
        if missing > MOST_AT_ONCE:
            self._controller.enqueue(key_of(self._job))
        self._create_pods(min(missing, MOST_AT_ONCE), active + waiting)

    def _create_pods(self, count: int, present: list[Object]) -> None:
        indexes = [-1] * count
        if rules.is_indexed(self._job):
            taken = rules.parse_indexes(self._status.get("completedIndexes", ""))
            taken |= {rules.index_of(pod) for pod in present}
            free = (index for index in range(self._job["spec"]["completions"]) if index not in taken)
            indexes = [index for index, _ in zip(free, range(count), strict=False)]
        namespace = self._job["metadata"]["namespace"]
        for index in indexes:
            try:
                pod = self._operations.create(PODS, namespace, new_pod(self._job, index))
            except StatusError as error:
                self._event("FailedCreate", f"Error creating: {error.message}", warning=True)
                self._controller.enqueue_after(key_of(self._job), 0.5)
                return
            self._event("SuccessfulCreate", f"Created pod: {pod['metadata']['name']}")
            self._pods = [*self._pods, pod]

    def _delete_pods(self, pods: list[Object]) -> None:
        """Delete pods without counting them."""
        for pod in pods:
            self._controller._release(pod)
            if self._delete_pod(pod):
                self._event("SuccessfulDelete", f"Deleted pod: {pod['metadata']['name']}")
        self._pods = self._controller._pods(self._job)

    def _delete_pod(self, pod: Object) -> bool:
        if self._controller.store.get(PODS.store_key, key_of(pod)) is None:
            return False
        self._operations.deletion.delete(PODS, key_of(pod), DeleteOptions(propagation="Background"))
        return True

    # -- the end --

    def _delete_active(self) -> None:
        for pod in self._pods:
            if rules.is_active(pod) and self._delete_pod(pod):
                self._event("SuccessfulDelete", f"Deleted pod: {pod['metadata']['name']}")
        self._pods = self._controller._pods(self._job)

    def _end(self, target: Object) -> None:
        """The job has ended once all its pods have."""
        if any(not rules.is_finished(pod) for pod in self._controller._pods(self._job)):
            return
        failed = target["type"] == "FailureTarget"

        def end(job: Object) -> None:
            status = job["status"]
            kind = "Failed" if failed else "Complete"
            set_condition(status["conditions"], kind, "True", reason=target["reason"], message=target["message"])
            status.pop("active", None)
            status["ready"] = status["terminating"] = 0
            if not failed:
                status["completionTime"] = timestamp()

        self._controller.operations.modify(JOBS, key_of(self._job), end)
        if failed:
            self._event(target["reason"], target["message"], warning=True)
        else:
            self._event("Completed", "Job completed")

    def _store(self) -> None:
        status = self._status
        active = sum(rules.is_active(pod) for pod in self._pods)
        if active:
            status["active"] = active
        else:
            status.pop("active", None)
        status["ready"] = sum(rules.is_active(pod) and rules.is_ready(pod) for pod in self._pods)
        status["terminating"] = sum(rules.is_terminating(pod) for pod in self._pods)
        status["uncountedTerminatedPods"] = {}
        if not status["conditions"]:
            del status["conditions"]
        current = self._controller.store.get(JOBS.store_key, key_of(self._job))
        if current is not None and current["metadata"]["uid"] == self._job["metadata"]["uid"]:
            self._operations.modify(JOBS, key_of(self._job), lambda job: job.update(status=status))

    def _event(self, reason: str, message: str, *, warning: bool = False) -> None:
        self._controller.cluster.events.record(self._old, reason, message, component=_COMPONENT, warning=warning)
