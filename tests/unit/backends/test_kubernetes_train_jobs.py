"""Attempts as TrainJobs: what they are called, what they say, and when an attempt is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kubernetes_launches import kubernetes_launch
from trainmaster.backends.cluster.engine import EngineLaunch
from trainmaster.backends.kubernetes.attempts import Attempts
from trainmaster.backends.kubernetes.gpus import GpuChoice
from trainmaster.backends.kubernetes.manifests import pod_template
from trainmaster.backends.kubernetes.options import KubernetesOptions
from trainmaster.backends.kubernetes.train_jobs import Dialect, inexpressible, name_of, train_job
from trainmaster.backends.kubernetes.views import EventView, train_job_view
from trainmaster.protocol.launch import KubernetesRequest

DIALECT = Dialect(
    field="runtimePatches",
    pod=frozenset({"terminationGracePeriodSeconds", "tolerations", "volumes", "affinity"}),
    container=frozenset({"env", "volumeMounts"}),
    has_metadata=True,
    has_deadline=True,
)


def launched(handle: str = "", *, attempt: int = 1, **values: Any) -> EngineLaunch:
    """An attempt that asks for a runtime."""
    launch = kubernetes_launch(handle=handle, image="python:3.12", **values)
    asked = KubernetesRequest(runtime="wide", runtime_kind="TrainingRuntime", labels={"team": "a"})
    request = replace(launch.request, attempt=attempt, launch=replace(launch.request.launch, kubernetes=asked))
    return replace(launch, request=request)


def made(launch: EngineLaunch) -> Any:
    template = pod_template(launch, KubernetesOptions(), GpuChoice())
    return train_job(launch, template, DIALECT)


@pytest.mark.parametrize(
    ("handle", "attempt", "name"),
    [
        ("lab", 1, "lab"),
        ("lab", 2, "lab-attempt-2"),
        ("a" * 48, 1, "a" * 48),
        # The pods of longer ones would have no valid name.
        ("a" * 49, 1, None),
        ("", 1, None),
        # No name of a Service.
        ("2nd", 1, None),
        ("Lab_1", 1, None),
        # Those of attempts.
        ("tm-k3f9-job-1-1", 1, None),
    ],
)
def test_train_job_is_called_like_its_job_where_that_can_be(handle: str, attempt: int, name: str | None) -> None:
    launch = launched(handle, attempt=attempt)
    assert name_of(launch, DIALECT) == (name or launch.name)
    # Pods without our labels are known by the name alone.
    assert name_of(launch, replace(DIALECT, has_metadata=False)) == launch.name


def test_train_job_names_its_runtime() -> None:
    document = made(launched("lab", nodes=2))
    assert document["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",  # as runtime_kind says
        "name": "wide",
    }
    assert document["spec"]["trainer"]["numNodes"] == 2
    assert document["metadata"]["name"] == "lab"
    assert document["metadata"]["labels"]["team"] == "a"


def test_image_that_is_pulled_when_it_is_missing_can_have_any_tag() -> None:
    def why_not(image: str, policy: str) -> str:
        launch = launched()
        launch = replace(launch, request=replace(launch.request, launch=replace(launch.request.launch, image=image)))
        options = KubernetesOptions.model_validate({"image_pull_policy": policy})
        return inexpressible(pod_template(launch, options, GpuChoice()), DIALECT)

    assert why_not("jax:latest", "IfNotPresent") == why_not("jax:1", "IfNotPresent") == why_not("jax", "Always") == ""
    assert "pulled Never" in why_not("jax:1", "Never")


def test_events_and_names_of_a_train_job_belong_to_its_attempt() -> None:
    launch = launched("lab")
    attempts = Attempts()

    def view(uid: str, name: str) -> Any:
        document = made(launch)
        labels = {**document["metadata"]["labels"], "trainmaster.io/attempt": name}
        return train_job_view({**document, "metadata": {**document["metadata"], "uid": uid, "labels": labels}})

    first, second = view("1", "tm-k3f9-a-1"), view("2", "tm-k3f9-b-1")
    attempts.job(None, first)
    assert [attempts.has(each) for each in ("lab", "lab-node-0", "lab-node-0-0-x7k2p", "other")] == [True] * 3 + [False]
    attempts.event(EventView(subject="lab-node-0", reason="FailedCreate", message="quota", at=1.0))
    (job,) = attempts.jobs(None, lists=1, train_job_lists=1).values()
    assert (job.handle, "quota" in job.message) == ("trainjob/tm-k3f9-a-1", False)
    # Another attempt has the name once the first is gone, and keeps it.
    attempts.begin(second, lists=1)
    attempts.job(first, None)
    attempts.forget(first.name)
    assert attempts.has("lab-node-0-0-x7k2p")
    attempts.event(EventView(subject="lab", reason="FailedCreate", message="quota", at=2.0))
    assert list(attempts.jobs(None, lists=1, train_job_lists=1)) == [second.name]
