"""`TrainerClient` on a cluster with Kubeflow Trainer, beside Kubeflow's own client; and on one without.

Like `test_kubernetes_api`, on the test server or on the real cluster of TRAINMASTER_TEST_KUBECONFIG, whose nodes are on
this machine.
"""

from __future__ import annotations

import json
import os
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kubeflow_programs import run_program
from kubernetes_client import KubernetesClient, Object, wait_for
from kubernetes_launches import IMAGE
from kubernetes_runtimes import RUNTIME, make_runtime
from kubernetes_server.process import running
from local_servers import quiet_port
from patience import PATIENCE_S
from real_server import RealServer
from trainmaster.trainer import (
    CustomTrainer,
    KubernetesBackendConfig,
    NotFoundError,
    TrainerClient,
)
from trainmaster.trainer.options import (
    Annotations,
    ContainerPatch,
    JobSetSpecPatch,
    JobSetTemplatePatch,
    JobSpecPatch,
    JobTemplatePatch,
    Labels,
    Name,
    PodSpecPatch,
    PodTemplatePatch,
    ReplicatedJobPatch,
    RuntimePatch,
    TrainingRuntimeSpecPatch,
)

KUBECONFIG = os.environ.get("TRAINMASTER_TEST_KUBECONFIG")
PAGE = Path(__file__).parents[3] / "docs" / "guides" / "trainer-client.md"
FEW_CORES = {"cpu": "100m"}


@pytest.fixture(scope="module")
def server(cluster: KubernetesClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server that knows no cluster, with its directory as the home of clients: the server of this machine."""
    home = tmp_path_factory.mktemp("trainer")
    started = RealServer(home / "data", "--port", str(quiet_port()), environment=reachable(cluster))
    try:
        yield started.start()
        assert "Traceback" not in started.log_text(), started.log_text()[-4000:]
    finally:
        started.clean_up()


def reachable(cluster: KubernetesClient) -> dict[str, str]:
    """Settings with which pods reach a server: it listens on the address of their node."""
    addresses = (each for node in cluster.list("Node") for each in node["status"]["addresses"])
    address = next(str(each["address"]) for each in addresses if each["type"] == "InternalIP")
    return {} if address.startswith("127.") else {"TRAINMASTER_HOST": address, "TRAINMASTER_BEHIND_PROXY": "1"}


@pytest.fixture(autouse=True)
def surroundings(server: RealServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TRAINMASTER_URL", "TRAINMASTER_API_KEY", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAINMASTER_HOME", str(server.directory))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def with_trainer(api: KubernetesClient) -> KubernetesClient:
    make_runtime(api)
    return api


@pytest.fixture
def client(with_trainer: KubernetesClient) -> Iterator[TrainerClient]:
    with connected(with_trainer) as made:
        yield made


def connected(api: KubernetesClient) -> TrainerClient:
    return TrainerClient(KubernetesBackendConfig(config_file=str(api.kubeconfig), namespace=api.namespace))


def add(numbers: list[int]) -> dict[str, int]:
    import os

    print("adding", *numbers, "on", os.environ["RANK"], os.environ.get("GIVEN"), flush=True)
    return {"sum": sum(numbers)}


def idle() -> None:
    import time

    print("it idles", flush=True)
    time.sleep(600)


def train_jobs(api: KubernetesClient) -> list[str]:
    return [each["metadata"]["name"] for each in api.list("TrainJob")]


def train_job_of(api: KubernetesClient, name: str) -> Object:
    """What runs a job, by whatever name."""
    made = api.list("TrainJob", labelSelector="app.kubernetes.io/managed-by=trainmaster")
    (found,) = (each for each in made if each["metadata"]["annotations"]["trainmaster.io/job-name"] == name)
    return found


def patch(**pod: Any) -> RuntimePatch:
    template = PodTemplatePatch(spec=PodSpecPatch(**pod))
    node = ReplicatedJobPatch(name="node", template=JobTemplatePatch(spec=JobSpecPatch(template=template)))
    whole = JobSetTemplatePatch(spec=JobSetSpecPatch(replicated_jobs=[node]))
    return RuntimePatch(training_runtime_spec=TrainingRuntimeSpecPatch(template=whole))


def test_job_is_a_train_job_of_a_runtime_of_the_cluster(client: TrainerClient, with_trainer: KubernetesClient) -> None:
    assert client.backend.name
    assert "KubernetesBackendConfig" in client.backend.why
    found = client.get_runtime(RUNTIME)
    assert (found.kind.value, found.trainer.image) == ("TrainingRuntime", IMAGE)
    assert {RUNTIME, "torch-distributed", "trainmaster-lora"} <= {each.name for each in client.list_runtimes()}
    options = [
        Name("sums"),
        Labels({"team": "a"}),
        Annotations({"note": "all of it"}),
        patch(containers=[ContainerPatch(name="node", env=[{"name": "GIVEN", "value": "yes"}])]),
    ]
    trainer = CustomTrainer(func=add, func_args={"numbers": [1, 2]}, num_nodes=2, resources_per_node=FEW_CORES)
    assert client.train(runtime=RUNTIME, trainer=trainer, options=options) == "sums"
    client.wait_for_job_status("sums", timeout=PATIENCE_S, polling_interval=0.2)
    assert client.get_job_result("sums") == {"sum": 3}
    for node in range(2):
        assert list(client.get_job_logs("sums", step=f"node-{node}")) == [f"adding 1 2 on {node} yes"]
    made = train_job_of(with_trainer, "sums")
    if not KUBECONFIG:  # an older Trainer may be installed
        assert made["metadata"]["name"] == "sums"
    assert made["spec"]["runtimeRef"]["name"] == RUNTIME
    assert (made["metadata"]["labels"]["team"], made["metadata"]["annotations"]["note"]) == ("a", "all of it")
    assert [job.name for job in client.list_jobs(RUNTIME)] == ["sums"]


@pytest.mark.long
def test_cluster_is_declared_once_and_by_a_server_elsewhere_with_sealed_credentials(
    client: TrainerClient, api: KubernetesClient, server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not server.url.startswith("http://127."):
        pytest.skip("credentials are not sent there without https")
    with connected(api) as second:
        assert second.backend == client.backend
    declared = server.data("GET", f"/v1/backends/{client.backend.name}")
    assert declared["options"]["kubeconfig"] == str(api.kubeconfig)
    server.data("DELETE", f"/v1/backends/{client.backend.name}")
    # The same server, as if it were elsewhere.
    monkeypatch.setenv("TRAINMASTER_HOME", str(server.directory.parent / "nothing"))
    monkeypatch.setenv("TRAINMASTER_URL", server.url)
    monkeypatch.setenv("TRAINMASTER_API_KEY", server.key)
    with connected(api) as third:
        assert third.backend.name == client.backend.name
        assert RUNTIME in {each.name for each in third.list_runtimes()}
    declared = server.data("GET", f"/v1/backends/{client.backend.name}")
    assert (declared["options"]["kubeconfig_content"], declared["options"]["kubeconfig"]) == ("***", "")
    assert declared["engine"]["problem"] is None
    body = {"name": "member", "scopes": ["manage", "view"]}
    key = server.data("POST", "/v1/keys", body)["key"]
    monkeypatch.setenv("TRAINMASTER_API_KEY", key)
    with connected(api) as member:
        assert member.backend.name == client.backend.name
    server.data("DELETE", f"/v1/backends/{client.backend.name}")
    with pytest.raises(ValueError, match=r"may not add a cluster.*backends add"):
        connected(api)


@pytest.mark.long
def test_taken_name_of_a_train_job_is_left_to_whoever_has_it(
    client: TrainerClient, with_trainer: KubernetesClient
) -> None:
    trainer = {"image": IMAGE, "command": ["python3", "-c", "print('theirs')"]}
    reference = {"kind": "TrainingRuntime", "name": RUNTIME}
    spec = {"runtimeRef": reference, "trainer": trainer, "suspend": True}
    with_trainer.create({"kind": "TrainJob", "metadata": {"name": "lab"}, "spec": spec})
    trainer_of_ours = CustomTrainer(func=add, func_args={"numbers": [2]}, resources_per_node=FEW_CORES)
    client.train(runtime=RUNTIME, trainer=trainer_of_ours, options=[Name("lab")])
    client.wait_for_job_status("lab", timeout=PATIENCE_S, polling_interval=0.2)
    names = train_jobs(with_trainer)
    assert len(names) == 2
    assert "lab" in names
    client.delete_job("lab")
    # What is left is theirs.
    shown = client.get_job("lab")
    assert (shown.status, shown.state, shown.runtime.name) == ("Created", "PAUSED", RUNTIME)
    with pytest.raises(RuntimeError, match="somebody else"):
        client.delete_job("lab")
    with_trainer.delete("TrainJob", "lab")
    wait_for(lambda: "lab" not in {job.name for job in client.list_jobs()}, "the job of others to go")
    with pytest.raises(NotFoundError):
        client.delete_job("lab")


@pytest.mark.long
def test_kubeflows_client_sees_and_follows_our_job(
    client: TrainerClient, with_trainer: KubernetesClient, tmp_path: Path
) -> None:
    trainer = CustomTrainer(func=add, func_args={"numbers": [1, 2]}, num_nodes=2, resources_per_node=FEW_CORES)
    name = client.train(runtime=RUNTIME, trainer=trainer)
    theirs = wait_for(lambda: train_jobs(with_trainer), "the TrainJob")[0]
    program = f"""
    name = {theirs!r}
    job = client.wait_for_job_status(name, timeout=120, polling_interval=1)
    said = {{
        "job": [job.status, job.num_nodes, job.runtime.name, sorted(step.name for step in job.steps)],
        "listed": [each.name for each in client.list_jobs()],
        "logs": [list(client.get_job_logs(name, step=f"node-{{node}}")) for node in range(2)],
        "events": sorted({{event.reason for event in client.get_job_events(name)}}),
    }}
    """
    said = run_program(tmp_path, with_trainer.kubeconfig, with_trainer.namespace, program)
    assert said["job"] == ["Complete", 2, RUNTIME, ["node-0", "node-1"]]
    assert said["listed"] == [theirs]
    assert [lines[-1] for lines in said["logs"]] == ["adding 1 2 on 0 None", "adding 1 2 on 1 None"]
    assert "Started" in said["events"]
    assert client.get_job(name).status == "Complete"


@pytest.mark.long
def test_job_that_kubeflows_client_deletes_ends_and_says_so(
    client: TrainerClient, with_trainer: KubernetesClient, tmp_path: Path
) -> None:
    name = client.train(runtime=RUNTIME, trainer=CustomTrainer(func=idle, resources_per_node=FEW_CORES))
    theirs = wait_for(lambda: train_jobs(with_trainer), "the TrainJob")[0]
    program = f"""
    name = {theirs!r}
    client.wait_for_job_status(name, {{"Running"}}, timeout=120, polling_interval=1)
    lines = client.get_job_logs(name, follow=True)
    said = next(line for line in lines if "idles" in line)
    client.delete_job(name)
    """
    assert run_program(tmp_path, with_trainer.kubeconfig, with_trainer.namespace, program) == "it idles"
    with pytest.raises(RuntimeError, match="ENGINE_CANCELLED"):
        client.wait_for_job_status(name, timeout=PATIENCE_S, polling_interval=0.2)
    wait_for(lambda: not with_trainer.list("Pod"), "the pods to go")


@pytest.mark.long
def test_our_client_sees_and_follows_the_jobs_of_kubeflows_client(
    client: TrainerClient, with_trainer: KubernetesClient, tmp_path: Path
) -> None:
    program = f"""
    def tell(word):
        import os
        print("it says", word, os.environ["JOB_COMPLETION_INDEX"], flush=True)

    trainer = CustomTrainer(
        func=tell, func_args={{"word": "yes"}}, image="{IMAGE}", num_nodes=2, resources_per_node={{"cpu": "100m"}}
    )
    said = client.train(runtime="{RUNTIME}", trainer=trainer, options=[Labels({{"team": "b"}})])
    """
    name = run_program(tmp_path, with_trainer.kubeconfig, with_trainer.namespace, program)
    looks: list[str] = []
    job = client.wait_for_job_status(
        name, timeout=PATIENCE_S, polling_interval=0.2, callbacks=[lambda each: looks.append(each.status)]
    )
    assert (job.status, job.num_nodes, job.runtime.name, job.labels) == ("Complete", 2, RUNTIME, {"team": "b"})
    assert [step.name for step in job.steps] == ["node-0", "node-1"]
    assert all(step.pod_name.startswith(f"{name}-node-0-") for step in job.steps)
    assert name in [each.name for each in client.list_jobs()]
    assert name in [each.name for each in client.list_jobs(RUNTIME)]
    assert list(client.get_job_logs(name, step="node-1", follow=True)) == ["it says yes 1"]
    assert list(client.get_job_logs(name, tail=1)) == ["it says yes 0"]
    for refused in (client.delete_job, client.cancel_job, client.suspend_job, client.retry_job, client.get_job_events):
        with pytest.raises(RuntimeError, match="somebody else"):
            refused(name)
    with_trainer.delete("TrainJob", name)
    with pytest.raises(NotFoundError):
        client.get_job(name)


@pytest.mark.long
def test_job_that_cannot_be_a_train_job_of_its_runtime_says_why(
    client: TrainerClient, with_trainer: KubernetesClient
) -> None:
    runtime = with_trainer.get("TrainingRuntime", RUNTIME)
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    runtime["spec"]["template"]["spec"]["replicatedJobs"] = [{**node, "name": "dataset-initializer"}, node]
    head = {"name": "fetching", "labels": runtime["metadata"]["labels"]}
    with_trainer.create({"kind": "TrainingRuntime", "metadata": head, "spec": runtime["spec"]})
    trainer = CustomTrainer(func=add, func_args={"numbers": [5]}, resources_per_node=FEW_CORES)
    name = client.train(runtime="fetching", trainer=trainer)
    client.wait_for_job_status(name, timeout=PATIENCE_S, polling_interval=0.2)
    assert train_jobs(with_trainer) == []
    said = "handed to the engine as an Indexed Job, and no TrainJob: its runtime has other jobs than node"
    assert any(event.message.startswith(said) for event in client.get_job_events(name))


@pytest.mark.long
def test_without_kubeflow_trainer_the_same_call_runs_as_an_indexed_job(
    server: RealServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path / "kubernetes", "--nodes", "1") as cluster:
        # Nothing but the kubeconfig says where.
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        with TrainerClient() as client:
            assert str(cluster.kubeconfig) in client.backend.why
            name = client.train(trainer=CustomTrainer(func=add, func_args={"numbers": [4]}, image=IMAGE))
            client.wait_for_job_status(name, timeout=PATIENCE_S, polling_interval=0.2)
            assert client.get_job_result(name) == {"sum": 4}
            events = json.dumps([event.message for event in client.get_job_events(name)])
            assert "handed to the engine" in events
        server.data("DELETE", f"/v1/backends/{client.backend.name}")


@pytest.mark.long
def test_example_of_the_page_runs_as_written(
    with_trainer: KubernetesClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if KUBECONFIG:
        pytest.skip("its image is of a registry")
    examples = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (example,) = (each for each in examples if "KubernetesBackendConfig" in each)
    monkeypatch.setenv("KUBECONFIG", str(with_trainer.kubeconfig))
    program = tmp_path / "example.py"
    program.write_text(example.replace("team-a", with_trainer.namespace))
    runpy.run_path(str(program))["client"].close()
    runtimes, said = capsys.readouterr().out.splitlines()
    assert RUNTIME in runtimes
    assert said == "rank 1 of 2"
