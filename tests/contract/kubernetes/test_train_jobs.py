"""What Kubeflow Trainer and JobSet do on a cluster, as far as Trainmaster and Kubeflow's client rely on it.

Like `test_kubernetes_api`, on the test server or on the real cluster of TRAINMASTER_TEST_KUBECONFIG.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kubeflow_programs import run_program
from kubernetes_client import ApiError, KubernetesClient, Object, condition_of, wait_for
from kubernetes_launches import IMAGE

ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
TELL = (
    "import os, socket; print(socket.gethostname(), *(f'{n}={v}' for n, v in sorted(os.environ.items()) "
    "if n.startswith(('PET_', 'GIVEN'))))"
)


@pytest.fixture(autouse=True)
def installed(cluster: KubernetesClient) -> None:
    if "trainer.kubeflow.org" not in {group["name"] for group in cluster.ask("GET", "/apis")["groups"]}:
        pytest.skip("Kubeflow Trainer is not installed on this cluster")


def replicated(name: str, step: str, *python: str, **fields: Any) -> Object:
    container = {"name": name, "image": IMAGE, "imagePullPolicy": "IfNotPresent"}
    if python:
        container["command"] = ["python3", "-c", *python]  # type: ignore[assignment]
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 2, "containers": [container]}
    spec = {"backoffLimit": 0, "template": {"spec": pod}}
    return {"name": name, "template": {"metadata": {"labels": {ANCESTOR: step}}, "spec": spec}, **fields}


def runtime(name: str, *jobs: Object, policy: Object | None = None) -> Object:
    return {
        "kind": "TrainingRuntime",
        "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": 1, **({"torch": {"numProcPerNode": "auto"}} if policy is None else policy)},
            "template": {"spec": {"replicatedJobs": list(jobs)}},
        },
    }


def train_job(name: str, *python: str, runtime: str = "own", **fields: Any) -> Object:
    trainer = {"image": IMAGE, "command": ["python3", "-c", *python], **fields.pop("trainer", {})}
    reference = {"kind": "TrainingRuntime", "name": runtime}
    return {
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {"runtimeRef": reference, "trainer": trainer, **fields},
    }


@pytest.fixture
def own_runtime(api: KubernetesClient) -> None:
    api.create(runtime("own", replicated("node", "trainer")))


def until(api: KubernetesClient, name: str, condition: str) -> Object:
    return condition_of(api.until_condition("TrainJob", name, condition), condition)


def pods_of(api: KubernetesClient, name: str) -> list[Object]:
    return api.list("Pod", labelSelector=f"jobset.sigs.k8s.io/jobset-name={name}")


@pytest.mark.usefixtures("own_runtime")
def test_train_job_runs_as_pods_with_the_variables_of_torchrun(api: KubernetesClient) -> None:
    trainer = {
        "numNodes": 2,
        "env": [{"name": "GIVEN", "value": "yes"}],
        "resourcesPerNode": {"limits": {"cpu": "2"}, "requests": {"cpu": "100m"}},
    }
    api.create(train_job("tj", TELL, trainer=trainer))
    assert until(api, "tj", "Complete")["reason"] == "AllJobsCompleted"
    pods = sorted(pods_of(api, "tj"), key=lambda pod: str(pod["metadata"]["name"]))
    assert [pod["metadata"]["name"].rpartition("-")[0] for pod in pods] == ["tj-node-0-0", "tj-node-0-1"]
    for index, pod in enumerate(pods):
        labels = pod["metadata"]["labels"]
        assert labels["jobset.sigs.k8s.io/replicatedjob-name"] == "node"
        assert labels["batch.kubernetes.io/job-completion-index"] == str(index)
        assert pod["spec"]["subdomain"] == "tj"
        said = api.log(pod["metadata"]["name"]).split()
        assert said[0] == f"tj-node-0-{index}"
        assert {*said[1:]} >= {
            "GIVEN=yes", "PET_NNODES=2", "PET_NPROC_PER_NODE=2", f"PET_NODE_RANK={index}",
            "PET_MASTER_ADDR=tj-node-0-0.tj", "PET_MASTER_PORT=29500",
        }  # fmt: skip
    assert api.get("JobSet", "tj")["metadata"]["ownerReferences"][0]["kind"] == "TrainJob"
    api.delete("TrainJob", "tj")
    wait_for(
        lambda: not pods_of(api, "tj") and not api.list("JobSet") and not api.list("Service"), "nothing to be left"
    )


@pytest.mark.usefixtures("own_runtime")
def test_train_job_whose_program_fails_is_failed(api: KubernetesClient) -> None:
    api.create(train_job("tj", "raise SystemExit(3)"))
    found = until(api, "tj", "Failed")
    assert found["reason"] == "FailedJobs"
    assert "tj-node-0" in found["message"]


@pytest.mark.usefixtures("own_runtime")
def test_suspended_train_job_has_no_pods_and_runs_once_it_is_resumed(api: KubernetesClient) -> None:
    api.create(train_job("tj", "print('ran')", suspend=True))
    until(api, "tj", "Suspended")
    api.until_condition("JobSet", "tj", "Suspended")
    assert not pods_of(api, "tj")
    api.patch("TrainJob", "tj", {"spec": {"suspend": False}}, media="merge")
    until(api, "tj", "Complete")
    assert condition_of(api.get("TrainJob", "tj"), "Suspended")["status"] == "False"


def test_initializer_runs_before_the_trainer(api: KubernetesClient) -> None:
    fetch = replicated("dataset-initializer", "dataset-initializer", "import os; print(os.environ['STORAGE_URI'])")
    node = replicated("node", "trainer", dependsOn=[{"name": "dataset-initializer", "status": "Complete"}])
    api.create(runtime("own", fetch, node))
    api.create(train_job("tj", "print('trained')", initializer={"dataset": {"storageUri": "hf://a/b"}}))
    until(api, "tj", "Complete")
    pods = {pod["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"]: pod for pod in pods_of(api, "tj")}
    assert api.log(pods["dataset-initializer"]["metadata"]["name"]).strip() == "hf://a/b"
    times = [pods[name]["metadata"]["creationTimestamp"] for name in ("dataset-initializer", "node")]
    assert times == sorted(times)


@pytest.mark.usefixtures("own_runtime")
def test_train_job_without_its_runtime_and_changes_of_one_are_refused(api: KubernetesClient) -> None:
    with pytest.raises(ApiError) as missing:
        api.create(train_job("tj", "", runtime="none"))
    assert missing.value.code == 403
    assert '"none" not found' in missing.value.message
    api.create(train_job("tj", "", suspend=True))
    with pytest.raises(ApiError) as changed:
        api.patch("TrainJob", "tj", {"spec": {"runtimeRef": {"name": "torch-distributed"}}}, media="merge")
    assert changed.value.code == 422
    assert "immutable" in changed.value.message


def test_kubeflows_client_sees_follows_and_deletes_its_job(api: KubernetesClient, tmp_path: Path) -> None:
    """With a runtime of a framework without launcher, whose functions `python` starts."""
    own = runtime("plain", replicated("node", "trainer"), policy={"jax": {}})
    own["metadata"]["labels"]["trainer.kubeflow.org/framework"] = "jax"
    api.create(own)
    program = f"""
    def tell(word):
        import os
        print("it says", word, os.environ["JOB_COMPLETION_INDEX"], flush=True)

    said = {{"runtimes": [runtime.name for runtime in client.list_runtimes()]}}
    trainer = CustomTrainer(
        func=tell, func_args={{"word": "yes"}}, image="{IMAGE}", num_nodes=2, resources_per_node={{"cpu": "100m"}}
    )
    name = client.train(runtime="plain", trainer=trainer, options=[Labels({{"team": "a"}})])
    client.wait_for_job_status(name, {{"Running", "Complete"}}, timeout=60, polling_interval=1)
    said["logs"] = [list(client.get_job_logs(name, step=f"node-{{node}}", follow=True)) for node in range(2)]
    job = client.wait_for_job_status(name, timeout=60, polling_interval=1)
    said["job"] = [job.status, job.num_nodes, sorted(step.name for step in job.steps)]
    said["listed"] = [job.name == name for job in client.list_jobs()]
    said["events"] = sorted({{event.reason for event in client.get_job_events(name)}})
    client.delete_job(name)
    said["left"] = len(client.list_jobs())
    """
    said = run_program(tmp_path, api.kubeconfig, api.namespace, program)
    assert {"torch-distributed", "plain"} <= set(said["runtimes"])
    assert said["logs"] == [["it says yes 0"], ["it says yes 1"]]
    assert said["job"] == ["Complete", 2, ["node-0", "node-1"]]
    assert said["listed"] == [True]
    assert "Started" in said["events"]
    assert said["left"] == 0
