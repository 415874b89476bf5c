"""What ends attempts that would have run on: evictions, too much on a disk, and Kueue.

Given the kubeconfig of a real cluster, all of it runs there, too; without Kueue, whose part the tests take.
"""

from __future__ import annotations

import pytest
from engine_attempts import ENDED, FOREVER, RUNNING, SAVES, Launch, MakeEngine, pods_up, until, until_phase

from kubernetes_client import KubernetesClient, wait_for
from trainmaster.backends.kubernetes.client import KubernetesEngine
from trainmaster.protocol.reasons import Reason

QUEUE = "kueue.x-k8s.io/queue-name"


def evict(api: KubernetesClient, pod: str) -> None:
    """What `kubectl drain` does with each pod of a node."""
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    api.ask("POST", f"{api.path('Pod', pod)}/eviction", eviction)


@pytest.mark.parametrize("nodes", [1, 2])
def test_evicted_worker_ends_its_attempt_though_it_exits_0(
    api: KubernetesClient, engine: KubernetesEngine, launch: Launch, nodes: int
) -> None:
    attempt = launch(SAVES, nodes=nodes)
    engine.start(attempt)
    pods = {pod["metadata"]["name"] for pod in pods_up(api, attempt)}
    until_phase(engine, attempt.name, RUNNING)
    evict(api, max(pods))
    # The index of a pod that exits 0 counts as completed, so that the Job goes on: the server ends its other pods.
    if until(engine, attempt.name, lambda job: job.node_losses or job.phase is ENDED).phase is RUNNING:
        engine.cancel(attempt.name)
    loss = until_phase(engine, attempt.name, ENDED).loss
    assert loss is not None
    assert loss.reason is Reason.EVICTED
    assert "as by `kubectl drain` (EvictionByEvictionAPI: " in loss.message
    # Nobody puts another in its place.
    made = {name for event in api.list("Event") if (name := event["involvedObject"]["name"]).startswith(attempt.name)}
    assert {name for name in made if name.count("-") > attempt.name.count("-")} <= pods


@pytest.mark.parametrize("handler", ["", "trap 'exit 0' TERM; "])
def test_worker_that_writes_more_than_it_may_says_so(make_engine: MakeEngine, launch: Launch, handler: str) -> None:
    """Of a pod that exits 0, only an event tells that it was evicted."""
    scratch = {"name": "worker", "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}
    volumes = [{"name": "scratch", "emptyDir": {}}]
    engine = make_engine(pod_template={"spec": {"volumes": volumes, "containers": [scratch]}})
    attempt = launch(f"{handler}head -c 40000000 /dev/urandom > /scratch/big; {FOREVER}", storage_mb=20)
    engine.start(attempt)
    loss = until_phase(engine, attempt.name, ENDED).loss
    assert loss is not None
    assert loss.reason is Reason.DISK_FULL
    assert "storage_min_mb" in loss.message
    assert "exceeds the total limit of containers 20Mi" in loss.message


def test_job_for_kueue_waits_in_its_queue_and_ends_when_kueue_takes_the_quota_away(
    api: KubernetesClient, make_engine: MakeEngine, launch: Launch
) -> None:
    engine = make_engine(kueue_queue="team-queue")
    attempt = launch(SAVES)
    engine.start(attempt)
    until(engine, attempt.name, lambda job: job.message == "waits in the queue team-queue of Kueue")
    made = api.get("Job", attempt.name)
    assert made["metadata"]["labels"][QUEUE] == "team-queue"
    assert made["spec"]["suspend"] is True
    assert api.list("Pod") == []
    api.patch("Job", attempt.name, {"spec": {"suspend": False}})
    until_phase(engine, attempt.name, RUNNING)
    pods_up(api, attempt)
    api.patch("Job", attempt.name, {"spec": {"suspend": True}})
    ended = until_phase(engine, attempt.name, ENDED)
    assert ended.loss is not None
    assert (ended.loss.reason, ended.loss.message) == (Reason.PREEMPTED, "Kueue gave its quota to another")
    engine.forget(attempt.name)
    wait_for(lambda: not api.list("Job") and not api.list("Pod"), "nothing to be left")
