"""What is made of a pod's status: why it waits, and how it ended, in states that a cluster seldom shows, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainmaster.backends.cluster.engine import EnginePhase
from trainmaster.backends.kubernetes.attempts import Attempts
from trainmaster.backends.kubernetes.manifests import ATTEMPT, ATTEMPT_ID
from trainmaster.backends.kubernetes.states import Attempt, engine_job, never_starts
from trainmaster.backends.kubernetes.views import Condition, EventView, JobView, PodView, pod_view
from trainmaster.protocol.reasons import Reason

NAME = "tm-k3f9-job-x-1"


def view(phase: str, **container: Any) -> PodView:
    head = {"name": f"{NAME}-0-abcde", "uid": "u", "labels": {ATTEMPT: NAME}, "annotations": {ATTEMPT_ID: "job-x.1"}}
    spec = {"containers": [{"name": "node"}], "nodeName": "n"}
    status = {"phase": phase, "containerStatuses": [{"name": "node", **container}]}
    return pod_view({"metadata": head, "spec": spec, "status": status}, "nvidia.com/gpu")


def attempt_with(pod: PodView, *, is_failed: bool = False, is_train_job: bool = False) -> Attempt:
    job = JobView(
        name=NAME,
        uid="j",
        attempt_id="job-x.1",
        count=1,
        is_started=True,
        is_suspended=False,
        is_deleting=False,
        queue="",
        failure=Condition(is_failed),
        is_over=is_failed,
        is_train_job=is_train_job,
    )
    return Attempt(name=NAME, attempt_id="job-x.1", job=job, pods={0: pod})


def test_watch_that_is_behind_does_not_undo_the_start_of_a_job() -> None:
    started = attempt_with(view("Pending")).job
    assert started is not None
    made, attempts = replace(started, is_started=False, is_suspended=True), Attempts()
    attempts.begin(started, lists=1)
    for old, new in ((None, made), (made, started)):
        attempts.job(old, new)
        assert attempts.jobs(None, lists=1)[NAME].phase is EnginePhase.QUEUED
    another = replace(made, uid="k")
    attempts.job(started, None)
    attempts.job(None, another)
    assert attempts.jobs(None, lists=1)[NAME].phase is EnginePhase.PREPARING


def ended(code: int) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}


def test_end_of_a_container_that_was_started_again_is_known_while_the_second_runs() -> None:
    pod = view("Running", restartCount=1, state={"running": {}}, lastState=ended(3))
    assert (pod.has_run, pod.has_ended, pod.has_failed, pod.exit_code) == (True, True, True, 3)


def test_container_that_was_started_again_has_failed_though_the_kubelet_forgot_how() -> None:
    """The kubelet keeps one ended container: that of the second time."""
    pod = view("Succeeded", restartCount=1, state=ended(0), lastState={})
    assert (pod.has_run, pod.has_ended, pod.has_failed) == (True, True, True)
    attempt = attempt_with(pod, is_train_job=True)
    assert attempt.is_broken
    loss = engine_job(attempt).loss
    assert loss is not None
    assert (loss.reason, loss.message) == (Reason.WORKER_LOST, "its worker ended and did not report how, on n")


def test_pod_that_is_deleted_before_it_runs_is_no_lost_node() -> None:
    """As the kubelet says it of a container that was never made."""
    unknown = {
        "exitCode": 137,
        "reason": "ContainerStatusUnknown",
        "message": "",
        "startedAt": None,
        "finishedAt": None,
    }
    pod = replace(view("Failed", restartCount=0, state={"terminated": unknown}, lastState={}), is_deleting=True)
    assert (pod.has_run, pod.has_ended, pod.exit_code) == (False, True, None)
    loss = engine_job(attempt_with(pod, is_failed=True)).loss
    assert loss is not None
    assert (loss.reason, loss.message) == (Reason.ENGINE_CANCELLED, "somebody deleted its pod on Kubernetes, on n")
    withdrawn = replace(attempt_with(pod), is_cancelled=True, is_gone=True)
    loss = engine_job(withdrawn).loss
    assert loss is not None
    assert (loss.reason, loss.message) == (Reason.ENGINE_CANCELLED, "it was withdrawn")


def waiting(reason: str, message: str = "") -> PodView:
    return view("Pending", state={"waiting": {"reason": reason, "message": message}})


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("InvalidImageName", "couldn't parse image name"),
        ("ErrImageNeverPull", ""),
        ("CreateContainerConfigError", 'configmap "settings" not found'),
        ("ErrImagePull", "pyhton:3.12: not found"),
        ("ImagePullBackOff", "pull access denied"),
    ],
)
def test_pod_that_can_never_start_says_why(reason: str, message: str) -> None:
    pod = waiting(reason, message)
    assert f"({reason}" in never_starts(pod)
    job = engine_job(attempt_with(pod))
    assert job.loss is not None
    assert job.loss.reason is Reason.LAUNCH_REFUSED


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ContainerCreating", ""),
        ("ImagePullBackOff", "i/o timeout"),
        ("CreateContainerConfigError", f'secret "{NAME}" not found'),
        ("CreateContainerConfigError", "failed to sync secret cache: timed out waiting for the condition"),
    ],
)
def test_pod_that_may_start_later_waits(reason: str, message: str) -> None:
    assert never_starts(waiting(reason, message)) == ""
    assert engine_job(attempt_with(waiting(reason, message))).loss is None


@pytest.mark.parametrize(
    ("status", "condition", "reason"),
    [
        ("", "PreemptionByScheduler", Reason.PREEMPTED),
        ("", "DeletionByTaintManager", Reason.EVICTED),
        ("", "EvictionByEvictionAPI", Reason.EVICTED),
        ("", "DeletionByPodGC", Reason.NODE_LOST),
        ("Evicted", "TerminationByKubelet", Reason.EVICTED),
        ("Evicted", "", Reason.EVICTED),
        ("NodeShutdown", "", Reason.EVICTED),
        ("DeadlineExceeded", "", Reason.TIMEOUT),
        ("OutOfcpu", "", Reason.ENGINE_UNAVAILABLE),
    ],
)
def test_end_of_a_pod_by_kubernetes_has_its_reason(status: str, condition: str, reason: Reason) -> None:
    ended_pod = view("Failed", restartCount=0, state=ended(143))
    pod = replace(ended_pod, reason=status, disruption=Condition(bool(condition), condition, "words"))
    loss = engine_job(attempt_with(pod, is_failed=True)).loss
    assert loss is not None
    assert loss.reason is reason


def test_pod_over_its_memory_says_the_limit() -> None:
    killed = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    pod = replace(view("Failed", restartCount=0, state=killed), memory_limit="64Mi")
    loss = engine_job(attempt_with(pod, is_failed=True)).loss
    assert loss is not None
    assert (loss.reason, "64Mi" in loss.message) == (Reason.OUT_OF_MEMORY, True)


@pytest.mark.parametrize(
    "message",
    [
        "Pod ephemeral local storage usage exceeds the total limit of containers 20Mi. ",
        'Container worker exceeded its local ephemeral storage limit "20Mi". ',
        'Usage of EmptyDir volume "scratch" exceeds the limit "1Mi". ',
    ],
)
def test_pod_over_its_storage_is_not_taken_for_one_of_a_full_node(message: str) -> None:
    ended_pod = view("Failed", restartCount=0, state=ended(137))
    loss = engine_job(attempt_with(replace(ended_pod, reason="Evicted", message=message), is_failed=True)).loss
    assert loss is not None
    assert loss.reason is Reason.DISK_FULL
    assert "storage_min_mb" in loss.message
    assert message.strip() in loss.message


def test_evicted_pod_that_exits_0_has_the_reason_of_its_event_though_it_is_gone() -> None:
    pod = view("Succeeded", restartCount=0, state=ended(0))
    attempts = Attempts()
    job = attempt_with(pod).job
    attempts.job(None, job)
    attempts.pod(None, pod)
    attempts.event(EventView(subject=pod.name, reason="Evicted", message="The node was low on memory.", at=1.0))
    attempts.event(EventView(subject=pod.name, reason="FailedKillPod", message="slow", at=2.0))
    attempts.pod(pod, None)
    loss = attempts.jobs(None, lists=1)[NAME].loss
    assert loss is not None
    assert (loss.reason, "The node was low on memory." in loss.message) == (Reason.EVICTED, True)


def test_pods_that_the_job_controller_deletes_after_a_failure_are_nobodys_doing() -> None:
    """It deletes them first, and says afterwards that the Job fails."""
    failed = view("Failed", restartCount=0, state=ended(137))
    running = replace(view("Running", restartCount=0, state={"running": {}}), uid="other", index=1, is_deleting=True)
    attempt = attempt_with(failed)
    attempt.pods[1] = running
    for living in ({"u", "other"}, {"u"}):
        attempt.living = living
        job = engine_job(attempt)
        assert job.loss is not None
        assert job.loss.reason is Reason.WORKER_LOST
        assert "exit code 137" in job.loss.message


def test_init_container_that_fails_is_the_reason() -> None:
    failed = {"name": "python", "state": {"terminated": {"exitCode": 1, "reason": "Error", "message": "no space"}}}
    head = {"name": f"{NAME}-0-abcde", "uid": "u", "labels": {ATTEMPT: NAME}}
    status = {"phase": "Failed", "initContainerStatuses": [failed]}
    pod = pod_view({"metadata": head, "spec": {"containers": [{"name": "worker"}]}, "status": status}, "nvidia.com/gpu")
    loss = engine_job(attempt_with(pod, is_failed=True)).loss
    assert loss is not None
    assert (loss.reason, loss.message) == (
        Reason.LAUNCH_REFUSED,
        "its init container python ended with exit code 1: no space",
    )
