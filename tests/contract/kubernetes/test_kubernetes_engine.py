"""The client of Kubernetes: starting, listing, finding, cancelling; why attempts wait and end; nodes and facts.

Given the kubeconfig of a real cluster, all of it runs there, too.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from engine_attempts import (
    ENDED,
    FOREVER,
    PREPARING,
    QUEUED,
    RUNNING,
    SAVES,
    Launch,
    MakeEngine,
    pods_up,
    until,
    until_phase,
)

from kubernetes_client import KubernetesClient, Object, wait_for
from kubernetes_launches import IMAGE, kubernetes_launch
from trainmaster.backends.cluster import worker_start
from trainmaster.backends.cluster.engine import EngineLaunch, EngineRefusedError
from trainmaster.backends.kubernetes import connection, manifests
from trainmaster.backends.kubernetes.client import KubernetesEngine
from trainmaster.backends.kubernetes.gpus import GpuChoice
from trainmaster.protocol.reasons import Reason
from trainmaster.server.core.resources import NodeState


def loss_of(engine: KubernetesEngine, launch: EngineLaunch) -> tuple[Reason, str]:
    engine.start(launch)
    loss = until_phase(engine, launch.name, ENDED).loss
    assert loss is not None
    return loss.reason, loss.message


def objects(api: KubernetesClient) -> list[str]:
    kinds = ("Job", "Pod", "Secret", "Service")
    return [
        f"{kind}/{name}" for kind in kinds for each in api.list(kind) if (name := each["metadata"]["name"])[:3] == "tm-"
    ]


def test_attempt_runs_on_two_nodes_which_know_their_numbers_and_names_and_nothing_is_left(
    api: KubernetesClient, engine: KubernetesEngine, launch: Launch
) -> None:
    looks = f"until getent hosts {{0}}-1.{{0}}; do sleep 0.2; done; echo node ${manifests.NODE_VARIABLE} up; sleep 2"
    two = launch("", nodes=2)
    two = launch(looks.format(two.name), nodes=2)
    assert engine.start(two) == two.name
    assert engine.start(two) == two.name
    job = until_phase(engine, two.name, RUNNING)
    assert (job.attempt_id, sorted(job.addresses)) == (two.request.attempt_id, [0, 1])
    assert engine.find(two.name) == engine.jobs()[two.name]
    logs = sorted(api.log(pod["metadata"]["name"]).splitlines()[-1] for pod in pods_up(api, two))
    assert logs == ["node 0 up", "node 1 up"]
    loss = until_phase(engine, two.name, ENDED).loss
    assert loss is not None
    assert loss.reason is Reason.WORKER_LOST
    assert sorted(each.split("/")[0] for each in objects(api)) == ["Job", "Pod", "Pod", "Secret", "Service"]
    engine.forget(two.name)
    wait_for(lambda: not objects(api), "all objects to go")
    wait_for(lambda: not engine.jobs(), "the list to be empty")
    assert engine.find(two.name) is None
    engine.forget(two.name)
    engine.cancel(two.name)


@pytest.mark.parametrize(
    ("script", "reason", "says"),
    [
        ("exit 7", Reason.WORKER_LOST, "exit code 7"),
        ("exit 71", Reason.LAUNCH_REFUSED, "`python`"),
        ("exec no-such-python", Reason.LAUNCH_REFUSED, "`python`"),
        ("python3 -c 'print(len(bytearray(300 << 20)))'", Reason.OUT_OF_MEMORY, "64Mi (OOMKilled"),
    ],
)
def test_end_of_a_bad_program_says_why(
    engine: KubernetesEngine, launch: Launch, script: str, reason: Reason, says: str
) -> None:
    found, message = loss_of(engine, launch(script, memory_mb=64))
    assert found is reason
    assert says in message


def test_a_worker_that_fails_takes_the_others_with_it(
    api: KubernetesClient, engine: KubernetesEngine, launch: Launch
) -> None:
    script = f"if [ ${manifests.NODE_VARIABLE} = 1 ]; then sleep 1; exit 3; fi; {FOREVER}"
    reason, message = loss_of(engine, launch(script, nodes=2))
    assert reason is Reason.WORKER_LOST
    assert "exit code 3" in message


def test_secrets_and_text_reach_the_worker_as_they_are_and_secrets_no_listing(
    api: KubernetesClient, engine: KubernetesEngine, launch: Launch
) -> None:
    secret, text = "s3cr3t-of-the-worker", "it's $(HOME) and $$5\n`x`"
    script = 'echo "$TOKEN"; echo "$PLAIN"; echo "on $(echo Linux)"; ' + FOREVER
    attempt = launch(script, secrets={"TOKEN": secret}, environment={"PLAIN": text})
    engine.start(attempt)
    (pod,) = pods_up(api, attempt)
    log = api.log(pod["metadata"]["name"])
    assert log.startswith(f"{secret}\n{text}\non Linux\n")
    shown = [*api.list("Job"), *api.list("Pod"), *api.list("Event"), engine.document(attempt), repr(attempt)]
    assert secret not in str(shown)
    (owner,) = api.get("Secret", attempt.name)["metadata"]["ownerReferences"]
    assert owner["name"] == attempt.name


def test_half_of_an_attempt_is_completed_and_runs_once(
    api: KubernetesClient, engine: KubernetesEngine, launch: Launch
) -> None:
    attempt = launch(FOREVER, secrets={"TOKEN": "x"})
    made = api.create(manifests.job(attempt, engine._options, GpuChoice()))
    job = until_phase(engine, attempt.name, PREPARING)
    assert engine.find(attempt.name) == job
    owner = manifests.owner_of(made)
    api.create(manifests.secret(attempt, owner))
    assert engine.start(attempt) == attempt.name
    until_phase(engine, attempt.name, RUNNING)
    pods_up(api, attempt)
    assert api.get("Job", attempt.name)["metadata"]["uid"] == made["metadata"]["uid"]
    engine.cancel(attempt.name)
    until_phase(engine, attempt.name, ENDED)


def test_half_of_an_attempt_that_nobody_wants_any_more_is_removed(
    api: KubernetesClient, engine: KubernetesEngine, launch: Launch
) -> None:
    attempt = launch(FOREVER)
    api.create(manifests.job(attempt, engine._options, GpuChoice()))
    until_phase(engine, attempt.name, PREPARING)
    engine.cancel(attempt.name)
    until_phase(engine, attempt.name, ENDED)
    assert objects(api) == []


def test_two_trainmasters_in_one_namespace_leave_each_other_alone(
    api: KubernetesClient, make_engine: MakeEngine
) -> None:
    ours, theirs = make_engine(instance="one"), make_engine(instance="two")
    mine, other = (kubernetes_launch(FOREVER, instance=name) for name in ("one", "two"))
    ours.start(mine)
    theirs.start(other)
    until_phase(ours, mine.name, RUNNING)
    until_phase(theirs, other.name, RUNNING)
    assert (list(ours.jobs()), list(theirs.jobs())) == ([mine.name], [other.name])
    assert ours.find(other.name) is None
    # A Job of that name which is not ours is neither used nor touched.
    api.create({"kind": "Job", "metadata": {"name": "tm-one-job-x-1"}, "spec": _job_of_somebody()})
    with pytest.raises(EngineRefusedError, match="somebody else"):
        ours.start(kubernetes_launch(FOREVER, instance="one", job_id="job-x"))


def _job_of_somebody() -> Object:
    container = {"name": "main", "image": IMAGE, "command": ["sh", "-c", FOREVER]}
    spec = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]}
    return {"template": {"spec": spec}}


def test_attempt_that_fits_nowhere_waits_with_the_words_of_the_scheduler_and_is_withdrawn(
    api: KubernetesClient, make_engine: MakeEngine, launch: Launch, unit: str
) -> None:
    engine = make_engine(gpu_resource=unit)
    attempt = launch(FOREVER, gpus=5)
    engine.start(attempt)
    job = until(engine, attempt.name, lambda job: "Insufficient" in job.message)
    assert job.phase is QUEUED
    assert job.message.startswith("waits (Unschedulable: 0/")
    assert f"Insufficient {unit}" in job.message
    engine.cancel(attempt.name)
    ended = until_phase(engine, attempt.name, ENDED)
    assert ended.loss is not None
    assert ended.loss.reason is Reason.ENGINE_CANCELLED
    engine.cancel(attempt.name)
    engine.forget(attempt.name)
    wait_for(lambda: not engine.jobs() and not objects(api), "nothing to be left")


def test_cancelled_worker_gets_sigterm_and_its_grace(
    api: KubernetesClient, engine: KubernetesEngine, launch: Launch
) -> None:
    attempt = launch(SAVES)
    engine.start(attempt)
    (pod,) = pods_up(api, attempt)
    lines: list[str] = []

    def follow() -> None:
        path = f"{api.path('Pod', pod['metadata']['name'])}/log"
        with api.http.stream("GET", path, params={"follow": "true"}) as answer:
            lines.extend(answer.iter_lines())

    reader = threading.Thread(target=follow)
    reader.start()
    engine.cancel(attempt.name)
    assert until(engine, attempt.name, lambda job: job.loss is not None).phase is RUNNING
    until_phase(engine, attempt.name, ENDED)
    reader.join()
    assert lines == ["up", "TERM", "saved"]


def test_job_deleted_by_somebody_says_so(api: KubernetesClient, engine: KubernetesEngine, launch: Launch) -> None:
    attempt = launch(SAVES)
    engine.start(attempt)
    pods_up(api, attempt)
    until_phase(engine, attempt.name, RUNNING)
    api.delete("Job", attempt.name, propagationPolicy="Background")
    loss = until_phase(engine, attempt.name, ENDED).loss
    assert loss is not None
    assert (loss.reason, loss.message) == (Reason.ENGINE_CANCELLED, "somebody deleted it on Kubernetes")


def test_pod_deleted_by_somebody_says_so(api: KubernetesClient, engine: KubernetesEngine, launch: Launch) -> None:
    attempt = launch(FOREVER, grace_s=0)
    engine.start(attempt)
    (pod,) = pods_up(api, attempt)
    until_phase(engine, attempt.name, RUNNING)
    api.delete("Pod", pod["metadata"]["name"], gracePeriodSeconds=1)
    loss = until(engine, attempt.name, lambda job: job.loss is not None).loss
    assert loss is not None
    assert loss.reason is Reason.ENGINE_CANCELLED
    assert "its pod" in loss.message


def test_job_suspended_by_somebody_ends_and_does_not_come_back(
    api: KubernetesClient, engine: KubernetesEngine, launch: Launch
) -> None:
    attempt = launch(SAVES)
    engine.start(attempt)
    pods_up(api, attempt)
    until_phase(engine, attempt.name, RUNNING)
    api.patch("Job", attempt.name, {"spec": {"suspend": True}})
    loss = until_phase(engine, attempt.name, ENDED).loss
    assert loss is not None
    assert (loss.reason, loss.message) == (Reason.ENGINE_CANCELLED, "somebody suspended it on Kubernetes")


def test_time_limit_of_kubernetes_says_so(api: KubernetesClient, engine: KubernetesEngine, launch: Launch) -> None:
    attempt = launch(FOREVER, grace_s=0, max_runtime_s=1000.0)
    engine.start(attempt)
    pods_up(api, attempt)
    assert api.get("Job", attempt.name)["spec"]["activeDeadlineSeconds"] == 1600
    api.patch("Job", attempt.name, {"spec": {"activeDeadlineSeconds": 1}})
    loss = until_phase(engine, attempt.name, ENDED).loss
    assert loss is not None
    assert loss.reason is Reason.TIMEOUT
    assert "DeadlineExceeded" in loss.message


def test_image_that_is_not_there_ends_the_attempt(make_engine: MakeEngine, launch: Launch) -> None:
    attempt = launch(FOREVER, image="Not a name", environment={worker_start.PYTHON: "python3"})
    reason, message = loss_of(make_engine(), attempt)
    assert reason is Reason.LAUNCH_REFUSED
    assert "InvalidImageName" in message


def test_preempted_attempt_says_so_though_its_pod_exits_0_and_vanishes(
    api: KubernetesClient, cluster: KubernetesClient, make_engine: MakeEngine, launch: Launch, unit: str, instance: str
) -> None:
    low, high = f"low-{api.namespace}", f"high-{api.namespace}"
    for name, value in ((low, 10), (high, 1000)):
        cluster.create({"kind": "PriorityClass", "metadata": {"name": name}, "value": value})
    try:
        engine = make_engine(gpu_resource=unit, priority_classes={0: low, 8: high})
        victim = launch(SAVES, gpus=4)
        engine.start(victim)
        pods_up(api, victim)
        until_phase(engine, victim.name, RUNNING)
        urgent = launch(FOREVER, gpus=4, priority=9, job_id="job-urgent", grace_s=0)
        engine.start(urgent)
        loss = until_phase(engine, victim.name, ENDED).loss
        until_phase(engine, urgent.name, RUNNING)
    finally:
        for name in (low, high):
            cluster.delete("PriorityClass", name)
    assert loss is not None
    assert loss.reason is Reason.PREEMPTED
    assert "higher priority pod" in loss.message


@pytest.mark.parametrize(
    ("options", "needs", "says"),
    [
        ({"namespace": "no-such-namespace"}, {}, "kubectl create namespace"),
        ({"pod_template": {"spec": {"nodename": "x"}}}, {}, "unknown field"),
        ({}, {"capabilities": ("not a label",)}, "cannot be a label"),
    ],
)
def test_what_is_refused_is_refused_with_a_remedy(
    make_engine: MakeEngine, launch: Launch, options: dict[str, Any], needs: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineRefusedError, match=says):
        make_engine(**options).start(launch(FOREVER, **needs))


def test_gpu_type_that_no_node_has_is_refused(make_engine: MakeEngine, launch: Launch, unit: str) -> None:
    with pytest.raises(EngineRefusedError, match="no node has GPUs of type b200; there are gpu"):
        make_engine(gpu_resource=unit).start(launch(FOREVER, gpus=1, gpu_type="b200"))


def test_pods_that_kubernetes_does_not_make_are_the_reason_for_waiting(make_engine: MakeEngine, launch: Launch) -> None:
    engine = make_engine(priority_classes={0: "no-such-class"})
    attempt = launch(FOREVER)
    engine.start(attempt)
    job = until(engine, attempt.name, lambda job: "no-such-class" in job.message)
    assert job.phase is QUEUED
    assert "does not make its pods (FailedCreate" in job.message


def test_nodes_have_what_jobs_can_take_and_what_others_hold(
    api: KubernetesClient, cluster: KubernetesClient, make_engine: MakeEngine, unit: str
) -> None:
    engine = make_engine(gpu_resource=unit, gpu_memory_mb=81_920)
    engine.jobs()
    nodes = {node.hostname: node for node in engine.nodes()}
    (owner,) = (node for node in nodes.values() if node.gpus)
    assert [(gpu.index, gpu.memory_mb) for gpu in owner.gpus] == [(index, 81_920) for index in range(4)]
    assert owner.cpu_cores > 0 < owner.ram_mb
    assert "kubernetes.io/os=linux" in owner.labels
    assert owner.state is NodeState.READY
    resources = {"limits": {unit: "3"}, "requests": {unit: "3"}}
    container = {"name": "main", "image": IMAGE, "command": ["sh", "-c", FOREVER]}
    spec = {"containers": [{**container, "resources": resources}], "terminationGracePeriodSeconds": 1}
    api.create({"kind": "Pod", "metadata": {"name": "of-somebody"}, "spec": spec})

    def held() -> int:
        return next(node.held_gpus for node in engine.nodes() if node.gpus)

    wait_for(lambda: held() == owner.held_gpus + 3, "what somebody holds")
    api.delete("Pod", "of-somebody", gracePeriodSeconds=1)
    wait_for(lambda: held() == owner.held_gpus, "what nobody holds")

    def state() -> tuple[NodeState, str]:
        return next((node.state, node.drain_reason) for node in engine.nodes() if node.gpus)

    cluster.patch("Node", owner.hostname, {"spec": {"unschedulable": True}})
    try:
        wait_for(lambda: state()[0] in (NodeState.DRAINED, NodeState.DRAINING), "the cordon")
        assert "unschedulable" in state()[1]
    finally:
        cluster.patch("Node", owner.hostname, {"spec": {"unschedulable": None}})
    wait_for(lambda: state()[0] is NodeState.READY, "the end of the cordon")


def test_kinds_that_nothing_happens_to_are_no_sign_of_an_absent_server(
    make_engine: MakeEngine, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 0.5)
    engine = make_engine()
    attempt = launch(FOREVER, grace_s=0)
    engine.start(attempt)
    until_phase(engine, attempt.name, RUNNING)
    lists = [follower.lists for follower in engine._watches.followers]
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        engine.wait(0.1)
        engine.jobs()  # raises if the API server does not seem to answer
        assert [follower.problem for follower in engine._watches.followers] == [None] * len(lists)
    # A watch goes on where the last one ended.
    assert [follower.lists for follower in engine._watches.followers] == lists
    engine.cancel(attempt.name)
    until_phase(engine, attempt.name, ENDED)


def test_facts_name_the_version_and_what_is_wrong(make_engine: MakeEngine, api: KubernetesClient) -> None:
    facts = make_engine().facts()
    assert facts.name.startswith("Kubernetes v1.")
    assert facts.host.endswith(f"namespace {api.namespace}")
    assert facts.problem == ""
    assert "there is no file /nowhere on the server" in make_engine(kubeconfig="/nowhere").facts().problem
    assert "context" in make_engine(context="no-such-context").facts().problem
    assert "credentials" in make_engine(token="nobodys").facts().problem
