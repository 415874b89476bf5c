"""The server as the chart runs it: two replicas in pods of the test server, as their service account."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from helm_chart import Object, of_kind, only, permissions_of, render
from kubernetes_client import ApiError, KubernetesClient, condition_of, wait_for
from kubernetes_server.process import KubernetesServer, running
from patience import PATIENCE_S
from postgres_server import running_postgres

ROOT = Path(__file__).parents[3]
API_KEY = "tm-the-first-key-of-this-server"
NAMESPACE, SERVER = "team", "tm-trainmaster"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "PREEMPTED")
OPEN_TO_ALL = {("authorization.k8s.io", "selfsubjectaccessreviews", "create")}
"""What every account may do without a role."""
RARE = {
    # An attempt that the watch does not show yet.
    ("batch", "jobs", "get"),
    ("trainer.kubeflow.org", "trainjobs", "get"),
    # What an earlier server has left, that was killed while it started an attempt.
    ("", "secrets", "patch"),
    ("", "services", "patch"),
    # Pods of a Job that somebody deleted without them.
    ("", "pods", "delete"),
    # Where clients of Kubeflow's look for the jobs of others.
    ("", "pods/log", "get"),
}
PREPARED = ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")


@dataclass
class Replica:
    """One pod of the server."""

    name: str
    url: str

    def ask(self, path: str, method: str = "GET", body: Any = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {API_KEY}"}
        return httpx.request(method, self.url + path, json=body, headers=headers, timeout=PATIENCE_S, trust_env=False)

    @property
    def leads(self) -> bool:
        return "trainmaster_leader 1.0" in self.ask("/metrics").text


@dataclass
class Release:
    """The chart, installed."""

    cluster: KubernetesServer
    api: KubernetesClient
    documents: list[Object]

    def start(self, replica: int) -> None:
        """What the controller of Deployments does, which the test server does not have."""
        template = only(self.documents, "Deployment")["spec"]["template"]
        name = f"{SERVER}-{replica}"
        self.api.create({"kind": "Pod", **template, "metadata": {**template["metadata"], "name": name}})

    def ready(self, replica: int) -> Replica:
        name = f"{SERVER}-{replica}"
        pod = self.api.until("Pod", name, lambda pod: condition_of(pod, "Ready").get("status") == "True")
        return Replica(name, f"http://{pod['status']['podIP']}:7070")


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    with (
        running_postgres() as postgres,
        running(tmp_path_factory.mktemp("kubernetes"), "--nodes", "2", "--trainer", "2.1") as cluster,
    ):
        postgres.directory.chmod(0o755)
        api = KubernetesClient(cluster.kubeconfig, NAMESPACE)
        documents = render(values_here(postgres.directory), namespace=NAMESPACE)
        api.create({"kind": "Namespace", "metadata": {"name": NAMESPACE}})
        secrets = {
            "database-url": f"postgresql://trainmaster@/{postgres.new_database()}?host=/srv/postgres",
            "secret-key": base64.b64encode(os.urandom(32)).decode(),
            "api-key": API_KEY,
        }
        api.create({"kind": "Secret", "metadata": {"name": "trainmaster"}, "stringData": secrets})
        for kind in (*PREPARED, "ConfigMap", "PersistentVolumeClaim", "Service"):
            for document in of_kind(documents, kind):
                api.create(document, fieldValidation="Strict")
        found = Release(cluster, api, documents)
        for replica in range(only(documents, "Deployment")["spec"]["replicas"]):
            found.start(replica)
        yield found
        api.close()


def values_here(postgres: Path) -> Object:
    """The "image" is this machine, where the code is in a checkout; pods share its network."""
    folders = {"code": ROOT, "python": Path(sys.prefix).resolve()}
    volumes = [{"name": name, "hostPath": {"path": str(folder)}} for name, folder in folders.items()]
    mounts = [{"name": name, "mountPath": str(folder), "readOnly": True} for name, folder in folders.items()]
    values: Object = {
        "extraEnv": [
            {"name": "PYTHONPATH", "value": str(ROOT / "src")},
            {"name": "TRAINMASTER_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "extraVolumes": [*volumes, {"name": "postgres", "hostPath": {"path": str(postgres)}}],
        "extraVolumeMounts": [*mounts, {"name": "postgres", "mountPath": "/srv/postgres"}],
    }
    if not all(is_open(folder) for folder in folders.values()):
        values["podSecurityContext"] = {"runAsNonRoot": False, "runAsUser": 0, "runAsGroup": 0}
    return values


def is_open(folder: Path) -> bool:
    """Whether every user can read it."""
    return all(each.stat().st_mode & 0o001 for each in (folder, *folder.parents))


def test_every_replica_becomes_ready_and_knows_the_first_key(release: Release) -> None:
    replicas = [release.ready(0), release.ready(1)]
    for replica in replicas:
        assert replica.ask("/healthz").json()["data"]["alive"] is True
        assert replica.ask("/readyz").json()["data"]["ready"] is True
        assert replica.ask("/v1/jobs").is_success
    endpoints = release.api.until("Endpoints", SERVER, lambda found: len(addresses(found)) == 2)
    assert {f"http://{address}:7070" for address in addresses(endpoints)} == {each.url for each in replicas}
    # The key of the Secret is the only one: no replica has made another.
    assert [key["name"] for key in replicas[0].ask("/v1/keys").json()["data"]["keys"]] == ["first"]


def test_jobs_run_in_pods_beside_the_server(release: Release) -> None:
    replicas = [release.ready(0), release.ready(1)]
    gang = submit(replicas[0], "sh", "-c", "echo I am rank $RANK", resource_config={"gpu_count": 0, "node_count": 2})
    endless = submit(replicas[1], "sleep", "1000")
    # Whoever leads: the other replica shows the same, from the volume that both have.
    for replica in replicas:
        wait_for(lambda: job(replica, gang)["status"] in ENDED, "the gang to end")  # noqa: B023
        assert job(replica, gang)["status"] == "COMPLETED", job(replica, gang)["error"]
        for node in (0, 1):
            assert f"I am rank {node}" in replica.ask(f"/v1/jobs/{gang}/logs?node={node}").text
    wait_for(lambda: job(replicas[0], endless)["status"] == "TRAINING", "the endless job to run")
    assert replicas[0].ask(f"/v1/jobs/{endless}/cancel", "POST").is_success
    wait_for(lambda: job(replicas[1], endless)["status"] == "CANCELLED", "the endless job to end")
    wait_for(lambda: not release.api.list("Job"), "the jobs to be removed from the cluster")


def test_job_of_a_training_runtime_is_a_train_job(release: Release) -> None:
    replica = release.ready(0)
    workload = {"kind": "command", "argv": ["true"], "kubernetes": {"runtime": "torch-distributed"}}
    job_id = submit(replica, workload=workload)
    wait_for(lambda: job(replica, job_id)["status"] in ENDED, "the job to end")
    assert job(replica, job_id)["status"] == "COMPLETED", job(replica, job_id)["error"]
    found = release.api.list("TrainJob")
    assert [each["metadata"]["annotations"]["trainmaster.io/attempt-id"] for each in found] == [f"{job_id}.1"]


def test_server_tries_only_what_it_may_and_needs_what_it_may(release: Release) -> None:
    """After what the test before did."""
    wait_for(lambda: not release.api.list("Job"), "the jobs to be removed from the cluster")
    account = f"system:serviceaccount:{NAMESPACE}:{SERVER}"
    asked = {tuple(each[:3]) for each in release.cluster.faults.asked(user=account)}
    roles = (*of_kind(release.documents, "Role"), *of_kind(release.documents, "ClusterRole"))
    granted = {each for role in roles for each in permissions_of(role)}
    assert asked - OPEN_TO_ALL <= granted
    assert granted - asked <= RARE


def test_server_may_do_nothing_else(release: Release) -> None:
    token = release.api.ask("POST", f"{release.api.path('ServiceAccount', SERVER)}/token", {"spec": {}})
    server = release.api.within(NAMESPACE, token=token["status"]["token"])
    elsewhere = release.api.within("default", token=token["status"]["token"])
    for kind in ("Job", "Pod", "Event", "Node"):
        server.list(kind)
    for refused in (
        lambda: server.list("Secret"),
        lambda: server.get("Secret", "trainmaster"),
        lambda: server.delete("Secret", "trainmaster"),
        lambda: server.list("ConfigMap"),
        lambda: server.create({"kind": "Pod", "metadata": {"name": "own"}, "spec": {"containers": []}}),
        lambda: elsewhere.list("Job"),
        lambda: server.patch("Node", "node-0", {"spec": {"unschedulable": True}}),
    ):
        with pytest.raises(ApiError) as caught:
            refused()
        assert caught.value.code == 403
    server.close()
    elsewhere.close()


def test_another_replica_leads_when_the_leader_is_killed(release: Release) -> None:
    replicas = [release.ready(0), release.ready(1)]
    leader = wait_for(lambda: next((each for each in replicas if each.leads), None), "a leader")
    (other,) = (each for each in replicas if each is not leader)
    release.api.delete("Pod", leader.name, gracePeriodSeconds=0)
    wait_for(lambda: other.leads, "the other replica to lead")
    release.api.until_gone("Pod", leader.name)
    release.start(replicas.index(leader))
    assert release.ready(replicas.index(leader)).ask("/v1/jobs").is_success


def addresses(endpoints: Object) -> list[str]:
    return [address["ip"] for subset in endpoints.get("subsets") or () for address in subset.get("addresses") or ()]


def submit(replica: Replica, *argv: str, **document: Any) -> str:
    body = {
        "name": "test",
        "workload": {"kind": "command", "argv": list(argv)},
        "resource_config": {"gpu_count": 0},
        **document,
    }
    answer = replica.ask("/v1/jobs", "POST", body)
    assert answer.is_success, answer.text
    return str(answer.json()["data"]["job_id"])


def job(replica: Replica, job_id: str) -> Any:
    return replica.ask(f"/v1/jobs/{job_id}").json()["data"]
