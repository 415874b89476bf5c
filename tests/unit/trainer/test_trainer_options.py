"""Options: what each changes in a job, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from trainmaster.server.core.spec.submit import SubmitJobRequest, compile_job
from trainmaster.trainer import CustomTrainer, CustomTrainerContainer
from trainmaster.trainer import options as o
from trainmaster.trainer.job_document import job_document
from trainmaster.trainer.runtimes.sources import built_in


def job(kind: str = "container") -> dict[str, Any]:
    return {"name": "made-up", "handle": "made-up", "workload": {"kind": kind, "image": "localhost/x"}}


def changed(option: o.Option, **given: Any) -> dict[str, Any]:
    document = job()
    option(document, **given)
    return document


def test_name_is_the_handle_too() -> None:
    document = changed(o.Name("first"))
    assert (document["name"], document["handle"]) == ("first", "first")


def test_labels_and_annotations_add_up() -> None:
    document = {**job(), "labels": {"team": "a", "kept": "yes"}}
    for option in (o.Labels({"team": "b"}), o.Annotations({"example.org/note": "try 2"}), o.Labels({"more": "x"})):
        option(document)
    assert document["labels"] == {
        "team": "b",
        "kept": "yes",
        "more": "x",
        "annotations/example.org/note": "try 2",
    }


def test_scheduling_options_lie_side_by_side() -> None:
    document = job()
    given = (
        o.ActiveDeadlineSeconds(60),
        o.Queue("team-a"),
        o.Priority(9),
        o.MaxRetries(2),
        o.Preemptible(),
        o.AllowWaitingForNodes(),
    )
    for option in given:
        option(document)
    assert document["scheduling_config"] == {
        "max_runtime_seconds": 60,
        "queue": "team-a",
        "priority": 9,
        "max_retries": 2,
        "preemptible": True,
        "allow_waiting_for_nodes": True,
    }


def test_of_two_options_the_last_one_wins() -> None:
    document = job()
    o.Priority(3)(document)
    o.Priority(4)(document)
    assert document["scheduling_config"]["priority"] == 4


def test_command_and_arguments_of_an_image() -> None:
    trainer = CustomTrainerContainer(image="localhost/x")
    document = job()
    o.TrainerCommand(["python", "train.py"])(document, trainer, "container")
    o.TrainerArgs(["--epochs", "3"])(document, trainer, "container")
    assert document["workload"]["argv"] == ["python", "train.py"]
    assert document["workload"]["args"] == ["--epochs", "3"]


@pytest.mark.parametrize(
    "option", [o.TrainerCommand(["a"]), o.TrainerArgs(["a"])], ids=lambda option: type(option).__name__
)
def test_command_of_what_is_no_image_is_refused(option: o.Option) -> None:
    with pytest.raises(ValueError, match=f"{type(option).__name__}.*CustomTrainer$"):
        option(job(), CustomTrainer(func=print), "container")
    with pytest.raises(ValueError, match=type(option).__name__):
        option(job("command"), None, "local")


def test_volumes_and_limits_are_the_workloads() -> None:
    document = job()
    o.Volumes([o.Volume("/srv/data", "/data", read_only=True)])(document, None, "container")
    o.Volumes([o.Volume("scratch", "/scratch")])(document, None, "container")
    o.Limits(shm_mb=512)(document, None, "container")
    assert document["workload"]["volumes"] == [
        {"source": "/srv/data", "target": "/data", "read_only": True},
        {"source": "scratch", "target": "/scratch", "read_only": False},
    ]
    assert document["workload"]["container"] == {"shm_mb": 512}


def test_volumes_of_a_built_in_trainer_make_its_workload() -> None:
    document: dict[str, Any] = {"name": "x", "training_config": {}}
    o.Volumes([o.Volume("/a", "/b")])(document)
    assert document["workload"]["kind"] == "trainer"


@pytest.mark.parametrize(
    ("option", "backend"),
    [
        (o.Volumes([]), "local"),
        (o.Limits(shm_mb=1), "local"),
        (o.RuntimePatch(), "local"),
        (o.RuntimePatch(), "container"),
        (o.RuntimePatch(), None),
    ],
)
def test_option_that_the_backend_cannot_do_is_refused_by_name(option: o.Option, backend: str | None) -> None:
    document = job()
    with pytest.raises(ValueError, match=type(option).__name__):
        option(document, None, backend)
    assert document == job()


@pytest.mark.parametrize(
    "make",
    [
        lambda: o.Name(""),
        lambda: o.Name(" "),
        lambda: o.Name(None),
        lambda: o.Labels(None),
        lambda: o.Labels({"a": 1}),
        lambda: o.Labels(["a"]),
        lambda: o.Annotations({1: "a"}),
        *(lambda seconds=seconds: o.ActiveDeadlineSeconds(seconds) for seconds in (0, -1, True, 1.0, "1", None)),
        lambda: o.Queue(""),
        *(lambda priority=priority: o.Priority(priority) for priority in (-1, 11, 5.0, "5", True)),
        *(lambda retries=retries: o.MaxRetries(retries) for retries in (-1, 101, "3", True)),
        lambda: o.Preemptible("yes"),
        lambda: o.AllowWaitingForNodes("yes"),
        lambda: o.TrainerCommand("python train.py"),
        lambda: o.TrainerCommand([]),
        lambda: o.TrainerCommand([1]),
        lambda: o.TrainerArgs(None),
        lambda: o.Volume("./relative", "/a"),
        lambda: o.Volume("/a", "relative"),
        lambda: o.Volume("/a", "/b", read_only="yes"),
        lambda: o.Volumes(["/a:/b"]),
        lambda: o.Volumes([o.Volume("/a", "/x"), o.Volume("/b", "/x")]),
        lambda: o.Limits(shm_mb=0),
        lambda: o.Limits(shm_mb="1g"),
        lambda: o.Limits(pids=True),
        lambda: o.RuntimePatch({"template": {}}),
    ],
)
def test_option_of_a_wrong_value_is_refused_when_it_is_made(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()


@pytest.mark.parametrize(
    "given",
    [
        {"name": ""},
        {"name": " "},
        {"name": None},
        {"name": "a", "env": {"x": "1"}},
        {"name": "a", "env": ["x"]},
        {"name": "a", "env": [{"value": "1"}]},
        {"name": "a", "env": [{"name": "", "value": "1"}]},
        {"name": "a", "env": [{"name": "x"}]},
        {"name": "a", "env": [{"name": "x", "valueFrom": "y"}]},
        {"name": "a", "env": [{"name": "x", "valueFrom": {"vault": {}}}]},
        {"name": "a", "volume_mounts": {}},
        {"name": "a", "volume_mounts": ["v"]},
        {"name": "a", "volume_mounts": [{"mountPath": "/x"}]},
        {"name": "a", "volume_mounts": [{"name": "v"}]},
        {"name": "a", "volume_mounts": [{"name": "v", "mountPath": "x"}]},
    ],
)
def test_container_patch_of_a_wrong_value_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ContainerPatch"):
        o.ContainerPatch(**given)


def node_patch(name: str = "node", **pod: Any) -> o.RuntimePatch:
    inner = o.PodTemplatePatch(metadata={"labels": {"a": "b"}}, spec=o.PodSpecPatch(**pod))
    job = o.ReplicatedJobPatch(name=name, template=o.JobTemplatePatch(spec=o.JobSpecPatch(template=inner)))
    template = o.JobSetTemplatePatch(spec=o.JobSetSpecPatch(replicated_jobs=[job]))
    return o.RuntimePatch(training_runtime_spec=o.TrainingRuntimeSpecPatch(template=template))


def test_runtime_patch_is_written_as_kubernetes_writes_it() -> None:
    container = o.ContainerPatch(
        name="node",
        env=[{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
        volume_mounts=[{"name": "data", "mountPath": "/data"}],
    )
    document = job()
    option = node_patch(containers=[container], node_selector={"zone_name": "a"}, volumes=[])
    option(document, None, "kubernetes")
    patched = {
        "metadata": {"labels": {"a": "b"}},
        "spec": {
            "containers": [{"name": "node", "env": container.env, "volumeMounts": container.volume_mounts}],
            "nodeSelector": {"zone_name": "a"},
        },
    }
    replicated = {"name": "node", "template": {"spec": {"template": patched}}}
    patch = {"trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}}}
    assert document["workload"]["kubernetes"] == {"runtime_patches": [patch]}
    launch = compile_job(SubmitJobRequest.model_validate(document)).launch
    assert launch.kubernetes.pod_patches == (patched,)


def test_runtime_patch_of_pods_that_there_are_not_is_refused_by_the_server() -> None:
    document = job()
    node_patch("dataset-initializer", node_selector={"zone": "a"})(document, None, "kubernetes")
    with pytest.raises(ValidationError, match="initializers run in these pods"):
        SubmitJobRequest.model_validate(document)


def test_options_make_a_job_that_the_server_takes() -> None:
    document = job()
    given = (
        o.Name("first"),
        o.Labels({"team": "a"}),
        o.Annotations({"example.org/note": "try 2"}),
        o.ActiveDeadlineSeconds(60),
        o.Queue("team-a"),
        o.Priority(9),
        o.MaxRetries(2),
        o.Preemptible(),
        o.AllowWaitingForNodes(),
        o.TrainerCommand(["python", "train.py"]),
        o.Volumes([o.Volume("/srv/data", "/data", read_only=True), o.Volume("scratch", "/scratch")]),
        o.Limits(shm_mb=512, pids=1024),
    )
    for option in given:
        option(document, CustomTrainerContainer(image="localhost/x"), "container")
    request = SubmitJobRequest.model_validate(document)
    scheduling = request.scheduling_config
    assert (request.handle, scheduling.priority, scheduling.max_retries) == ("first", 9, 2)


def set_of_a_train_job(job_spec: dict[str, Any], trainer: object, backend: object) -> None:
    """An option as users of Kubeflow write one."""
    metadata = job_spec.setdefault("metadata", {})
    metadata.setdefault("labels", {})["team"] = "a"
    metadata["annotations"] = {"note": "try 2"}
    metadata["name"] = "mine"
    spec = job_spec.setdefault("spec", {})
    spec["activeDeadlineSeconds"] = 60
    spec.setdefault("trainer", {})["env"] = [{"name": "NCCL_DEBUG", "value": "WARN"}]


def test_option_written_for_kubeflow_is_taken() -> None:
    document = compiled(CustomTrainer(func=nothing), [set_of_a_train_job, o.Labels({"team": "b"})])
    assert (document["name"], document["handle"]) == ("mine", "mine")
    assert document["labels"]["team"] == "b"  # the last one counts
    assert document["labels"]["annotations/note"] == "try 2"
    assert document["scheduling_config"]["max_runtime_seconds"] == 60
    assert document["workload"]["environment"] == {"NCCL_DEBUG": "WARN"}
    assert not {"metadata", "spec"} & document.keys()


def test_command_of_an_option_written_for_kubeflow_is_taken() -> None:
    def command(job_spec: dict[str, Any], trainer: object, backend: object) -> None:
        job_spec.setdefault("spec", {}).setdefault("trainer", {}).update(command=["python"], args=["train.py"])

    document = compiled(CustomTrainerContainer(image="image:1"), [command])
    assert (document["workload"]["argv"], document["workload"]["args"]) == (["python"], ["train.py"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metadata": {"namespace": "team"}}, "sets metadata.namespace of a TrainJob, which has no counterpart here"),
        ({"metadata": "a"}, "it must have fields"),
        ({"metadata": {"labels": {"a": 1}}}, "labels must be a dictionary from text to text"),
        ({"spec": {"suspend": True}}, "spec.suspend of a TrainJob, which has no counterpart here: suspend_job"),
        ({"spec": {"trainer": {"numNodes": 2}}}, "give num_nodes to the trainer"),
        ({"spec": {"runtimePatches": []}}, "the objects of a Kubernetes cluster"),
        ({"spec": {"trainer": {"env": [{"name": "A", "valueFrom": {}}]}}}, "it needs a name and a value"),
    ],
)
def test_field_of_a_train_job_without_a_counterpart_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compiled(CustomTrainer(func=nothing), [lambda job_spec, trainer, backend: job_spec.update(fields)])


def nothing() -> None:
    """A training."""


def compiled(trainer: object, options: list[Any]) -> dict[str, Any]:
    runtime = built_in().runtimes.get("torch-distributed")
    assert runtime is not None
    return job_document(name="job-1", runtime=runtime, trainer=trainer, options=options)
