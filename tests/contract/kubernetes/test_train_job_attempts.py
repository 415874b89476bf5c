"""Attempts that are TrainJobs: made once, found again under the name that they got, and nobody else's touched.

Like `test_kubernetes_api`, on the test server or on the real cluster of TRAINMASTER_TEST_KUBECONFIG.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kubernetes_client import KubernetesClient, wait_for
from kubernetes_launches import IMAGE, kubernetes_launch
from kubernetes_runtimes import RUNTIME, make_runtime
from trainmaster.backends.cluster.engine import EngineLaunch, EnginePhase
from trainmaster.backends.kubernetes.client import KubernetesEngine
from trainmaster.backends.kubernetes.options import KubernetesOptions
from trainmaster.protocol.launch import KubernetesRequest
from trainmaster.protocol.reasons import Reason

INSTANCE = "t1"
FOREVER = "trap 'exit 0' TERM; while :; do sleep 0.1; done"


@pytest.fixture
def api_with_runtime(api: KubernetesClient) -> KubernetesClient:
    make_runtime(api)
    return api


@pytest.fixture
def engine(api_with_runtime: KubernetesClient) -> Iterator[KubernetesEngine]:
    with contextlib.closing(make_engine(api_with_runtime)) as made:
        yield made


def make_engine(api: KubernetesClient) -> KubernetesEngine:
    options = KubernetesOptions(kubeconfig=str(api.kubeconfig), namespace=api.namespace, image=IMAGE)
    return KubernetesEngine("k8s", INSTANCE, options)


def launch(handle: str = "lab") -> EngineLaunch:
    made = kubernetes_launch(FOREVER, instance=INSTANCE, handle=handle)
    asked = KubernetesRequest(runtime=RUNTIME, runtime_kind="TrainingRuntime")
    return replace(made, request=replace(made.request, launch=replace(made.request.launch, kubernetes=asked)))


def names(api: KubernetesClient) -> list[str]:
    return sorted(each["metadata"]["name"] for each in api.list("TrainJob"))


def until_phase(engine: KubernetesEngine, name: str, phase: EnginePhase) -> None:
    def has_it() -> bool:
        engine.wait(0.2)
        job = engine.jobs().get(name)
        return job is not None and job.phase is phase

    wait_for(has_it, f"{name} to be {phase}")


def test_train_job_is_made_once_and_ended_by_whoever_comes_after(
    engine: KubernetesEngine, api_with_runtime: KubernetesClient
) -> None:
    api = api_with_runtime
    attempt = launch()
    assert engine.start(attempt) == engine.start(attempt) == f"trainjob/{attempt.name}"
    assert len(names(api)) == 1
    until_phase(engine, attempt.name, EnginePhase.RUNNING)
    with contextlib.closing(make_engine(api)) as later:
        found = later.find(attempt.name)
        assert found is not None
        until_phase(later, attempt.name, EnginePhase.RUNNING)
        later.cancel(found.handle)
        until_phase(later, attempt.name, EnginePhase.ENDED)
        loss = later.jobs()[attempt.name].loss
        assert loss is not None
        assert loss.reason is Reason.ENGINE_CANCELLED
    wait_for(lambda: not names(api) and not api.list("Pod"), "nothing to be left")


@pytest.mark.long
def test_name_that_was_another_attempts_before_is_not_deleted_with_it(
    engine: KubernetesEngine, api_with_runtime: KubernetesClient
) -> None:
    """The first is deleted by somebody, another takes its name, and then the first is forgotten."""
    api = api_with_runtime
    first = launch()
    handle = engine.start(first)
    until_phase(engine, first.name, EnginePhase.RUNNING)
    (called,) = names(api)
    api.delete("TrainJob", called)
    until_phase(engine, first.name, EnginePhase.ENDED)
    wait_for(lambda: not api.list("JobSet"), "the job set to go")
    second = replace(launch(), name=f"{first.name}-again")
    engine.start(second)
    if not os.environ.get("TRAINMASTER_TEST_KUBECONFIG"):  # an older Trainer may be installed
        assert names(api) == [called] == ["lab"]
    third = replace(launch(), name=f"{first.name}-third")
    engine.start(third)
    engine.cancel(handle)
    assert len(names(api)) == 2
    engine.cancel(f"trainjob/{second.name}")
    wait_for(lambda: names(api) == [third.name], "the second to go")
