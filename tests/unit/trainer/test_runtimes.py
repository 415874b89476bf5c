"""Documents in the shape of Kubeflow's TrainingRuntime, and what a job takes from them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from runtime_documents import container, job, runtime, text_of

from trainmaster.plain_yaml import parse_yaml
from trainmaster.server.core.training.types import BUILT_IN
from trainmaster.trainer.job_document import job_document
from trainmaster.trainer.runtimes.document import RuntimeDocumentError, read_runtime, runtime_of
from trainmaster.trainer.runtimes.sources import TextFile, built_in, read_files
from trainmaster.trainer.types import RuntimeKind, TrainerType


def read(document: object) -> Any:
    return read_runtime(document, "mine.yaml")


def test_document_gives_all_that_a_job_takes_from_it() -> None:
    document = runtime(
        "wide",
        kind="ClusterTrainingRuntime",
        policy={"numNodes": 2, "torch": {"numProcPerNode": 4}},
        annotations={"trainmaster.io/packages": "einops>=0.8,<1\n\n  numpy\n"},
        image="training:1",
        command=["python", "-m"],
        args=["train", 7],
        env=[{"name": "A", "value": "1"}, {"name": "PORT", "value": 80}, {"name": "EMPTY"}],
        resources={"requests": {"cpu": 2, "memory": "1Gi"}, "limits": {"cpu": "4", "nvidia.com/gpu": 4}},
    )
    found = read(document)
    assert (found.name, found.kind, found.framework) == ("wide", RuntimeKind.CLUSTER_TRAINING_RUNTIME, "torch")
    assert (found.trainer_type, found.training_type) == (TrainerType.CUSTOM_TRAINER, None)
    assert (found.image, found.num_nodes, found.ranks_per_node) == ("training:1", 2, 4)
    assert (found.command, found.args) == (("python", "-m"), ("train", "7"))
    assert found.environment == {"A": "1", "PORT": "80", "EMPTY": ""}
    assert found.resources == {"cpu": "4", "memory": "1Gi", "gpu": 4}
    assert found.packages == ("einops>=0.8,<1", "numpy")
    assert (found.origin, found.document) == ("mine.yaml", document)


def test_document_with_little_has_defaults() -> None:
    found = read(runtime())
    assert (found.image, found.num_nodes, found.ranks_per_node) == (None, 1, None)
    assert (found.command, found.packages, found.pretrained_model, found.dataset) == ((), (), None, None)


@pytest.mark.parametrize(
    ("policy", "ranks"),
    [
        ({"torch": {}}, None),
        ({"torch": {"numProcPerNode": "auto"}}, None),
        ({"torch": {"numProcPerNode": "gpu"}}, None),
        ({"torch": {"numProcPerNode": "cpu"}}, 3),
        ({"torch": {"numProcPerNode": "2"}}, 2),
        ({"mpi": {"numProcPerNode": 5, "mpiImplementation": "OpenMPI"}}, 5),
        ({"mpi": None}, None),
        ({"jax": {}}, 1),
        ({"xgboost": {}}, None),
        ({}, 1),
    ],
)
def test_ranks_of_a_node_follow_from_the_policy(policy: dict[str, Any], ranks: int | None) -> None:
    assert read(runtime(policy=policy, resources={"limits": {"cpu": 3}})).ranks_per_node == ranks


@pytest.mark.parametrize(
    ("framework", "policy", "variables"),
    [
        (
            "jax",
            {"jax": {}},
            {
                "JAX_COORDINATOR_ADDRESS": "$(MASTER_ADDR):$(MASTER_PORT)",
                "JAX_NUM_PROCESSES": "$(WORLD_SIZE)",
                "JAX_PROCESS_ID": "$(RANK)",
            },
        ),
        (
            "xgboost",
            {"xgboost": {}},
            {
                "DMLC_TRACKER_URI": "$(MASTER_ADDR)",
                "DMLC_TRACKER_PORT": "$(MASTER_PORT)",
                "DMLC_TASK_ID": "$(RANK)",
                "DMLC_NUM_WORKER": "$(WORLD_SIZE)",
            },
        ),
        ("deepspeed", {"mpi": {"numProcPerNode": 1, "mpiImplementation": "OpenMPI"}}, {}),
        ("torch", {"torch": {}}, {}),
        ("plain", {}, {}),
    ],
)
def test_policy_sets_the_variables_that_processes_find_each_other_by(
    framework: str, policy: dict[str, Any], variables: dict[str, str]
) -> None:
    assert read(runtime(framework=framework, policy=policy)).environment == variables


def test_policy_of_mpi_starts_processes_with_mpirun_and_a_file_may_say_otherwise() -> None:
    policy = {"mpi": {"numProcPerNode": 2, "sshAuthMountPath": "/home/mpiuser/.ssh", "runLauncherAsNode": True}}
    found = read(runtime(framework="mlx", policy=policy))
    assert (found.ranks_per_node, found.environment["MPI_LAUNCHER"].split()[0]) == (2, "mpirun")
    own = [{"name": "MPI_LAUNCHER", "value": "mpiexec -n 1"}]
    assert read(runtime(framework="mlx", policy=policy, env=own)).environment["MPI_LAUNCHER"] == "mpiexec -n 1"


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"mpi": {"mpiImplementation": "MPICH"}}, r"spec.mlPolicy.mpi.mpiImplementation: is MPICH; only OpenMPI"),
        ({"flux": {"numProcPerNode": 1}}, "spec.mlPolicy.flux: cannot be carried out here"),
    ],
)
def test_policy_that_nothing_here_can_carry_out_is_refused(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeDocumentError, match=message):
        read(runtime(policy=policy))


def test_variables_of_a_pods_labels_are_those_of_the_job() -> None:
    def of(field: str) -> dict[str, Any]:
        return {"valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": field}}}

    env = [
        {"name": "TRAIN_JOB_NAME", **of("metadata.labels['jobset.sigs.k8s.io/jobset-name']")},
        {"name": "INDEX", **of("metadata.annotations['batch.kubernetes.io/job-completion-index']")},
        {"name": "IP", **of("status.podIP")},
    ]
    found = read(runtime(env=env))
    assert found.job_name_variables == ("TRAIN_JOB_NAME",)
    assert found.environment == {"INDEX": "$(NODE_RANK)"}
    assert [each.partition(" ")[2] for each in found.left_out] == ["(IP)"]


def test_file_for_torchtune_is_a_built_in_trainer_without_the_image_of_torchtune() -> None:
    def fetching(part: str, uri: str) -> dict[str, Any]:
        env = [{"name": "STORAGE_URI", "value": uri}]
        return job(part, part, [{"name": part, "image": "initializer:1", "env": env}])

    node = job("node", "trainer", [container(image="torchtune:1", command=["tune", "run"])])
    jobs = [fetching("dataset-initializer", "hf://org/rows"), fetching("model-initializer", "hf://org/model"), node]
    found = read(runtime("torchtune-mine", framework="torchtune", jobs=jobs))
    assert (found.trainer_type, found.image) == (TrainerType.BUILTIN_TRAINER, None)
    assert (found.pretrained_model, found.dataset) == ("hf://org/model", "hf://org/rows")
    document = job_document(name="job-1", runtime=found)
    assert document["training_config"]["base_model"]["model_id"] == "hf://org/model"
    assert document["data_config"]["sources"] == [{"path": "hf://org/rows"}]
    assert document["training_config"]["training_type"] == "SFT"


def test_policy_with_an_mpi_launcher_takes_the_container_that_trains() -> None:
    launcher = job("launcher", "trainer", [container(image="mpi:1", command=["mpirun"])])
    worker = job("node", None, [container(image="mpi:1", command=["sshd"])])
    assert read(runtime(policy={"mpi": {}}, jobs=[worker, launcher])).command == ("mpirun",)


def test_initializers_say_which_model_and_dataset() -> None:
    def fetching(step: str, uri: str) -> dict[str, Any]:
        env = [{"name": "STORAGE_URI", "value": uri}]
        return job(step, step, [{"name": step, "image": "fetch:1", "env": env}])

    jobs = [fetching("dataset-initializer", "hf://rows/of"), fetching("model-initializer", "hf://a/model"), job()]
    found = read(runtime(jobs=jobs, framework="torchtune"))
    assert (found.dataset, found.pretrained_model) == ("hf://rows/of", "hf://a/model")
    assert found.trainer_type is TrainerType.BUILTIN_TRAINER
    named = read(runtime(jobs=jobs, annotations={"trainmaster.io/pretrained-model": "hf://another/model"}))
    assert named.pretrained_model == "hf://another/model"


def test_training_type_makes_a_built_in_trainer() -> None:
    found = read(runtime(annotations={"trainmaster.io/training-type": "LORA"}))
    assert (found.trainer_type, found.training_type) == (TrainerType.BUILTIN_TRAINER, "LORA")


def test_variables_that_only_a_cluster_knows_are_left_out_and_told() -> None:
    secret = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    found = read(runtime(env=[secret, {"name": "A", "value": "1"}]))
    assert found.environment == {"A": "1"}
    assert len(found.left_out) == 1
    assert found.left_out[0].endswith("containers[0].env[0] (TOKEN)")


def test_fields_of_kubeflow_that_mean_nothing_here_are_passed_over() -> None:
    document = runtime(volumeMounts=[{"name": "v", "mountPath": "/v"}])
    document["spec"] |= {"podGroupPolicy": {"coscheduling": {}}, "suspend": False}
    document["status"] = None
    assert read(document).name == "mine"


def changed(*path: str, to: object) -> dict[str, Any]:
    document = runtime()
    place: Any = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = to
    return document


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "mine.yaml: is empty"),
        (["a"], "mine.yaml: must have fields"),
        ({}, "mine.yaml: kind: is required"),
        (changed("kind", to="Pod"), "mine.yaml: kind: is Pod; a runtime is a "),
        (changed("metadata", to={}), "mine.yaml: metadata.name: is required"),
        (
            changed("metadata", "labels", to={}),
            "mine.yaml: metadata.labels.trainer.kubeflow.org/framework: is required",
        ),
        (changed("metadata", "labels", to="torch"), "mine.yaml: metadata.labels: must have fields"),
        (changed("spec", "mlPolicy", "numNodes", to=0), "mine.yaml: spec.mlPolicy.numNodes: must be a whole number"),
        (changed("spec", "mlPolicy", "numNodes", to=True), "mine.yaml: spec.mlPolicy.numNodes: must be a whole number"),
        (
            runtime(policy={"torch": {"numProcPerNode": "cpu"}}),
            "mine.yaml: spec.mlPolicy.torch.numProcPerNode: is cpu, a process for each core",
        ),
        (runtime(jobs=[]), "mine.yaml: spec.template.spec.replicatedJobs: has no job called node"),
        (runtime(jobs=[job(containers=[])]), "mine.yaml: spec.template.spec.replicatedJobs: has no job called node"),
        (changed("spec", "template", "spec", "replicatedJobs", to={}), "replicatedJobs: must be a list"),
        (runtime(image=["a"]), "containers[0].image: must be text"),
        (runtime(env=[{"value": "1"}]), "containers[0].env[0].name: is required"),
        (runtime(env={"A": "1"}), "containers[0].env: must be a list"),
        (runtime(resources={"limits": {"cpu": [1]}}), "resources.limits.cpu: must be an amount"),
    ],
)
def test_wrong_document_is_refused_by_file_and_field(document: object, message: str) -> None:
    with pytest.raises(RuntimeDocumentError) as refused:
        read(document)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("limits", "device", "count"),
    [
        ({"nvidia.com/gpu": 4, "cpu": 8}, "gpu", "8"),
        ({"nvidia.com/mig-1g.5gb": "1"}, "mig-1g.5gb", "2"),
        ({"google.com/tpu": 4.0}, "tpu", "8"),
        ({"cpu": "500m"}, "cpu", "500m"),
        ({"memory": "1Gi"}, "Unknown", "Unknown"),
    ],
)
def test_user_sees_the_devices_of_all_nodes(limits: dict[str, Any], device: str, count: str) -> None:
    shown = runtime_of(read(runtime(policy={"numNodes": 2, "torch": {}}, resources={"limits": limits})))
    assert (shown.trainer.device, shown.trainer.device_count, shown.trainer.num_nodes) == (device, count, 2)


def test_user_sees_the_runtime() -> None:
    shown = runtime_of(read(runtime(image="i:1", command=["a", "b"])))
    assert (shown.name, shown.kind, shown.pretrained_model) == ("mine", RuntimeKind.TRAINING_RUNTIME, None)
    assert (shown.trainer.image, shown.trainer.framework, shown.trainer.command) == ("i:1", "torch", ("a", "b"))


def test_file_has_many_documents_and_errors_name_which() -> None:
    text = text_of(runtime("a"), {"kind": "Kustomization"}, {"kind": 3}, runtime("b"), runtime("c", image=[1]))
    found = read_files([TextFile(name="many.yaml", text=text), TextFile(name="bad.yaml", text="a: [")])
    assert [each.name for each in found.runtimes.values()] == ["a", "b"]
    assert [each.origin for each in found.runtimes.values()] == ["many.yaml, document 1", "many.yaml, document 4"]
    unnamed, broken, not_yaml = found.problems
    assert (
        unnamed.message
        == "many.yaml, document 3: kind: is 3; a runtime is a ClusterTrainingRuntime or a TrainingRuntime"
    )
    assert (broken.runtime, broken.message.partition(": ")[0]) == ("c", "many.yaml, document 5")
    assert not_yaml.message.startswith("bad.yaml, line ")


def test_text_that_is_nested_without_end_is_a_problem_and_no_crash() -> None:
    found = read_files([TextFile(name="deep.yaml", text="[" * 20_000)])
    assert [problem.message for problem in found.problems] == ["deep.yaml is nested too deeply"]


def test_built_in_runtimes_are_whole() -> None:
    found = built_in()
    assert found.problems == []
    custom = {each.name for each in found.runtimes.values() if each.trainer_type is TrainerType.CUSTOM_TRAINER}
    assert custom == {
        "deepspeed-distributed",
        "jax-distributed",
        "mlx-distributed",
        "mpi",
        "python",
        "torch-distributed",
        "torch-distributed-with-cache",
        "xgboost-distributed",
    }
    assert all(each.image is None for each in found.runtimes.values())


def test_page_shows_a_file_that_is_good_and_every_built_in_runtime() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "runtimes.md").read_text()
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    found = read(parse_yaml(shown, "page"))
    assert (found.name, found.packages, found.resources) == ("vision", ("einops>=0.8",), {"gpu": 4})
    table = page.partition("## Built-in runtimes")[2]
    assert [each.name for each in built_in().runtimes.values() if f"`{each.name}`" not in table] == []


def test_every_built_in_trainer_has_a_runtime() -> None:
    trainers = {each.training_type: each.name for each in built_in().runtimes.values() if each.training_type}
    assert set(trainers) == {str(kind) for kind in BUILT_IN}
    assert trainers["LORA"] == "trainmaster-lora"
