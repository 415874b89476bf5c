"""What a user gave to `train()`, as a job document. Each document is one that the server's own parser takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainmaster.protocol.launch import CONTAINER, LOCAL
from trainmaster.server.core.errors import TrainmasterError
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.trainer import ContainerBackendConfig, LocalProcessBackendConfig
from trainmaster.trainer.functions import check_arguments, source_of
from trainmaster.trainer.job_document import FRAMEWORK_LABEL, RUNTIME_LABEL, check_name, job_document, random_name
from trainmaster.trainer.options import (
    ActiveDeadlineSeconds,
    Annotations,
    Labels,
    Limits,
    Name,
    Priority,
    TrainerArgs,
    TrainerCommand,
)
from trainmaster.trainer.resources import nodes_from
from trainmaster.trainer.runtimes import TrainingRuntime
from trainmaster.trainer.runtimes.sources import built_in
from trainmaster.trainer.server_choice import Surroundings, choose
from trainmaster.trainer.types import (
    BuiltinTrainer,
    CustomTrainer,
    CustomTrainerContainer,
    DataCacheInitializer,
    DataFormat,
    DataType,
    HuggingFaceDatasetInitializer,
    HuggingFaceModelInitializer,
    Initializer,
    LoraConfig,
    Loss,
    RuntimeKind,
    S3DatasetInitializer,
    S3ModelInitializer,
    ScriptTrainer,
    TorchTuneConfig,
    TorchTuneInstructDataset,
    TrainerType,
)

OUTSIDE = 3
"""A name that a function must not use."""


def runtime(name: str = "torch-distributed", **changes: Any) -> TrainingRuntime:
    fields: dict[str, Any] = {
        "name": name,
        "kind": RuntimeKind.TRAINING_RUNTIME,
        "framework": "torch",
        "trainer_type": TrainerType.CUSTOM_TRAINER,
        **changes,
    }
    return TrainingRuntime(**fields)


TUNING = runtime("tuning", trainer_type=TrainerType.BUILTIN_TRAINER)
DATA = HuggingFaceDatasetInitializer("hf://org/data")
MODEL = HuggingFaceModelInitializer("hf://org/model")


def compiled(trainer: object = None, *, accepted: bool = True, **arguments: Any) -> dict[str, Any]:
    """The document, which the server would take."""
    document = job_document(**{"name": "job-1", "runtime": runtime(), "trainer": trainer, **arguments})
    if accepted:
        parse_submit(document)
    return document


def nothing() -> None:
    pass


def step(lr: float, layers: list[int] | None = None) -> float:
    return lr * len(layers or ())


def test_function_becomes_a_job_of_its_source_and_arguments() -> None:
    document = compiled(
        CustomTrainer(
            func=step,
            func_args={"lr": 0.5, "layers": [1, 2]},
            packages_to_install=["einops>=0.8"],
            pip_index_urls=["https://index.example/simple", "https://other.example/simple"],
            num_nodes=2,
            resources_per_node={"gpu": 4, "CPU": "500m", "memory": "10G", "storage": "1Gi"},
            env={"A": "b"},
        ),
        backend=LOCAL,
    )
    workload = document["workload"]
    scope: dict[str, Any] = {}
    exec(workload.pop("source"), scope)
    assert scope["step"](lr=2.0, layers=[1]) == 2.0
    assert document == {
        "name": "job-1",
        "handle": "job-1",
        "backend": "local",
        "labels": {RUNTIME_LABEL: "torch-distributed", FRAMEWORK_LABEL: "torch"},
        "workload": {
            "kind": "function",
            "name": "step",
            "arguments": {"lr": 0.5, "layers": [1, 2]},
            "packages": ["einops>=0.8"],
            "index_urls": ["https://index.example/simple", "https://other.example/simple"],
            "ranks_per_node": 4,
            "environment": {"A": "b"},
        },
        "resource_config": {
            "node_count": 2,
            "gpu_count": 8,
            "cpu_cores": 1,
            "ram_min_mb": 9537,
            "storage_min_mb": 1024,
        },
    }


def test_function_without_more_leaves_gpus_to_the_server() -> None:
    document = compiled(CustomTrainer(func=nothing))
    assert document["resource_config"] == {"node_count": 1}
    assert document["workload"]["ranks_per_node"] == 1
    assert "backend" not in document


def test_runtime_fills_what_the_trainer_leaves_open() -> None:
    base = runtime(
        image="image:1",
        num_nodes=3,
        ranks_per_node=2,
        resources={"cpu": "2"},
        environment={"A": "runtime", "B": "runtime"},
        packages=("Torch", "numpy==2.0"),
    )
    trainer = CustomTrainer(func=nothing, packages_to_install=["torch==2.8"], env={"A": "trainer"})
    workload = compiled(trainer, runtime=base)["workload"]
    assert workload["packages"] == ["numpy==2.0", "torch==2.8"]
    assert workload["environment"] == {"A": "trainer", "B": "runtime"}
    assert workload["ranks_per_node"] == 2
    assert workload["image"] == "image:1"  # on whichever backend: where images count for nothing, there is none here
    assert compiled(trainer, runtime=base)["resource_config"] == {"node_count": 3, "cpu_cores": 2, "gpu_count": 0}
    own = CustomTrainer(func=nothing, image="mine:2")
    assert compiled(own, runtime=base, backend=CONTAINER)["workload"]["image"] == "mine:2"


def test_function_inside_of_another_keeps_its_texts() -> None:
    def inner() -> str:
        return """one
  two"""

    scope: dict[str, Any] = {}
    exec(source_of(inner), scope)
    assert scope["inner"]() == inner()


class Holder:
    def method(self) -> None: ...


def closing(value: int) -> Callable[[], int]:
    def inner() -> int:
        return value

    return inner


def generating() -> Any:
    yield 1


def uses_outside() -> int:
    class Inside:
        value = OUTSIDE

    return Inside.value


def annotated(path: functools.partial[int]) -> None: ...


@functools.cache
def decorated() -> None: ...


@functools.wraps(nothing)
def wrapping() -> None: ...


typed: dict[str, Any] = {}
exec("def at_a_prompt(): pass", typed)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda: 1, "lambda"),
        (Holder().method, "method"),
        (Holder, "a type cannot"),
        (3, "a int cannot"),
        (len, "builtin"),
        (functools.partial(step, 1), "partial"),
        (closing(1), "uses value of the function around it"),
        (generating, "generator"),
        (uses_outside, "uses OUTSIDE"),
        (decorated, "cannot be sent"),
        (wrapping, "is decorated"),
        (typed["at_a_prompt"], "not at a prompt"),
    ],
)
def test_function_that_cannot_travel_is_refused_with_what_to_do(function: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compiled(CustomTrainer(func=function))


def test_annotations_of_a_module_that_defers_them_need_no_names() -> None:
    assert source_of(annotated).startswith("from __future__ import annotations\n")


def test_coroutine_is_a_function() -> None:
    async def train() -> int:
        import asyncio

        await asyncio.sleep(0)
        return 1

    assert "async def train" in source_of(train)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"lr": object()}, r"func_args\['lr'\] is a object"),
        ({"lr": float("nan")}, "JSON cannot hold"),
        ({"layers": [1, {2: 3}]}, "keys of func_args must be text"),
        ([1], "must be a dict"),
        ({"lr": 1, "rate": 1}, "cannot be called with func_args"),
        (None, "cannot be called with func_args"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: Any, says: str) -> None:
    def train(lr: float, layers: list[int]) -> None: ...

    with pytest.raises(ValueError, match=says):
        check_arguments(train, arguments)


def test_one_dict_is_taken_where_names_do_not_bind() -> None:
    def train(config: dict[str, Any]) -> None: ...

    assert check_arguments(train, {"lr": 1}) == {"lr": 1}


@pytest.mark.parametrize(
    ("num_nodes", "resources", "says"),
    [
        (0, None, "num_nodes"),
        (-1, None, "num_nodes"),
        (True, None, "num_nodes"),
        (1, {"gpu": "many"}, "gpu"),
        (1, {"gpu": 1.5}, "whole number"),
        (1, {"memory": "10Q"}, "memory"),
        (1, {"cpu": 0}, "more than 0"),
        (1, {"gpu": 1, "mig-1g.5gb": 1}, "one kind of GPU"),
        (1, {"mig-1g.5gb": 1, "mig-2g.10gb": 1}, "one kind of GPU"),
        (1, {"google.com/tpu": 4}, "no such resource"),
        (1, ["gpu"], "must be a dict"),
    ],
)
def test_resources_that_cannot_be_had_are_refused(num_nodes: Any, resources: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        nodes_from(num_nodes, resources)


@pytest.mark.parametrize(
    ("resources", "config"),
    [
        ({"mig-1g.5gb": 2}, {"node_count": 2, "gpu_count": 4, "gpu_type": "mig-1g.5gb"}),
        ({"nvidia.com/gpu": "1"}, {"node_count": 2, "gpu_count": 2}),
        ({"gpu": 0}, {"node_count": 2, "gpu_count": 0}),
        ({"memory": 1 << 30}, {"node_count": 2, "gpu_count": 0, "ram_min_mb": 1024}),
        (
            {"ephemeral-storage": "2Gi", "cpu": 2.5},
            {"node_count": 2, "gpu_count": 0, "storage_min_mb": 2048, "cpu_cores": 3},
        ),
    ],
)
def test_resources_are_the_servers_own(resources: dict[str, Any], config: dict[str, Any]) -> None:
    assert nodes_from(2, resources).resource_config == config


def test_container_runs_the_image_and_what_options_say() -> None:
    trainer = CustomTrainerContainer(image="image:1", env={"A": "b"})
    assert compiled(trainer, backend=CONTAINER)["workload"] == {
        "kind": "container",
        "image": "image:1",
        "ranks_per_node": 1,
        "environment": {"A": "b"},
    }
    options = [TrainerCommand(["python"]), TrainerArgs(["-m", "mine"])]
    said = compiled(trainer, options=options)["workload"]
    assert (said["argv"], said["args"]) == (["python"], ["-m", "mine"])
    behind_the_entry_point = compiled(trainer, options=[TrainerArgs(["-m"])])["workload"]
    assert behind_the_entry_point["args"] == ["-m"]
    assert "argv" not in behind_the_entry_point
    with pytest.raises(ValueError, match="image"):
        compiled(CustomTrainerContainer(image=" "))


def test_what_the_client_says_goes_with_every_job() -> None:
    common = {"container": {"pull_policy": "Never", "auto_remove": False, "runtime": "podman"}}
    options = [Limits(shm_mb=64)]
    function = compiled(CustomTrainer(func=nothing), backend=CONTAINER, common=common, options=options)
    assert function["workload"]["container"] == {**common["container"], "shm_mb": 64}
    assert "shm_mb" not in common["container"]
    tuned = BuiltinTrainer(TorchTuneConfig())
    tuned_in = compiled(tuned, runtime=TUNING, initializer=Initializer(DATA, MODEL), common=common)
    assert tuned_in["workload"] == {"kind": "trainer", **common}


def test_built_in_trainer_takes_variables_of_its_own() -> None:
    tuned = BuiltinTrainer(TorchTuneConfig(), env={"NCCL_DEBUG": "WARN", "HF_ENDPOINT": "https://mirror.test"})
    noisy = replace(TUNING, environment={"NCCL_DEBUG": "INFO", "OTHER": "1"})
    document = compiled(tuned, runtime=noisy, initializer=Initializer(DATA, MODEL))
    assert document["training_config"]["environment"] == {
        "NCCL_DEBUG": "WARN",
        "OTHER": "1",
        "HF_ENDPOINT": "https://mirror.test",
    }
    with pytest.raises(ValueError, match="another value for HF_TOKEN than env"):
        compiled(
            BuiltinTrainer(TorchTuneConfig(), env={"HF_TOKEN": "a"}),
            runtime=TUNING,
            initializer=Initializer(DATA, HuggingFaceModelInitializer("hf://org/model", access_token="b")),
        )


def test_image_that_starts_torchrun_itself_finds_its_variables() -> None:
    image = CustomTrainerContainer(image="image:1", num_nodes=2, resources_per_node={"gpu": 4}, env={"PET_NNODES": "9"})
    torch = compiled(image, runtime=runtime(policy="torch"))["workload"]
    assert torch["ranks_per_node"] == 1
    assert torch["environment"] == {
        "PET_NNODES": "9",
        "PET_NPROC_PER_NODE": "4",
        "PET_NODE_RANK": "$(NODE_RANK)",
        "PET_MASTER_ADDR": "$(MASTER_ADDR)",
        "PET_MASTER_PORT": "$(MASTER_PORT)",
    }
    assert "PET_NODE_RANK" not in compiled(image, runtime=runtime(policy="jax"))["workload"]["environment"]


def test_variable_with_the_jobs_name_has_the_one_that_an_option_gave() -> None:
    named = runtime(job_name_variables=("TRAIN_JOB_NAME",))
    document = compiled(CustomTrainer(func=nothing), runtime=named, options=[Name("mine")])
    assert document["workload"]["environment"] == {"TRAIN_JOB_NAME": "mine"}


def test_without_a_trainer_the_runtimes_command_runs() -> None:
    words = {"command": ("python", "-c"), "args": ("print(1)",)}
    assert compiled(runtime=runtime(**words))["workload"]["argv"] == ["python", "-c", "print(1)"]
    in_image = compiled(runtime=runtime(**words, image="image:1"))["workload"]
    assert (in_image["kind"], in_image["image"]) == ("container", "image:1")
    assert (in_image["argv"], in_image["args"]) == (["python", "-c"], ["print(1)"])
    alone = compiled(runtime=runtime(args=("--fast",), image="image:1"))["workload"]
    assert "argv" not in alone  # they go to the image's own entry point
    assert alone["args"] == ["--fast"]
    with pytest.raises(ValueError, match="no command of its own"):
        compiled()


def test_script_goes_alone_or_with_its_directory() -> None:
    alone = compiled(ScriptTrainer(script="code/train.py", args=["--lr", "1"]), accepted=False)["workload"]
    assert (alone["kind"], alone["path"], alone["args"]) == ("script", "train.py", ["--lr", "1"])
    assert alone["files"] == [{"source": "code/train.py", "path": "train.py"}]
    shipped = ["lib/model.py", "train.py"]
    whole = compiled(ScriptTrainer(script="./train.py", directory="code"), shipped=shipped, accepted=False)["workload"]
    assert (whole["path"], whole["files"]) == ("train.py", [{"source": "lib/model.py"}, {"source": "train.py"}])
    with pytest.raises(ValueError, match="not among the files"):
        compiled(ScriptTrainer(script="other.py", directory="code"), shipped=shipped)


def test_packages_that_are_named_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="flash-attn"):
        compiled(CustomTrainer(func=nothing, packages_to_install=["flash_attn", "Flash.Attn>=2"]))


def test_initializers_say_what_the_client_says_of_all() -> None:
    common = {"dataset": {"image": "fetch:1", "timeout_s": 5}, "model": {"timeout_s": 5}}
    trainer = CustomTrainer(func=nothing)
    both = compiled(trainer, initializer=Initializer(DATA, MODEL), initializers=common)["workload"]["initializers"]
    assert (both["dataset"]["image"], both["dataset"]["timeout_s"]) == ("fetch:1", 5)
    assert ("image" in both["model"], both["model"]["timeout_s"]) == (False, 5)
    assert "initializers" not in compiled(trainer, initializers=common)["workload"]
    tuned = BuiltinTrainer(config=TorchTuneConfig())
    with pytest.raises(ValueError, match="fetches its dataset itself"):
        compiled(tuned, runtime=TUNING, initializer=Initializer(DATA, MODEL), initializers=common)


def test_time_limit_of_initializers_is_refused_for_a_built_in_trainer_which_has_none(tmp_path: Path) -> None:
    def initializers(**values: Any) -> Mapping[str, Mapping[str, Any]]:
        around = Surroundings(environment={}, home=tmp_path, in_cluster=False)
        return choose(ContainerBackendConfig(**values), around).initializers

    limited = initializers(initializer_timeout=5)
    own = compiled(CustomTrainer(func=nothing), initializer=Initializer(DATA), initializers=limited)
    assert own["workload"]["initializers"]["dataset"]["timeout_s"] == 5
    tuned = BuiltinTrainer(config=TorchTuneConfig())
    fetched = Initializer(DATA, MODEL)
    with pytest.raises(ValueError, match=r"fetches its dataset itself, without a time limit: .*initializer_timeout"):
        compiled(tuned, runtime=TUNING, initializer=fetched, initializers=limited)
    compiled(tuned, runtime=TUNING, initializer=fetched, initializers=initializers())
    with pytest.raises(ValueError, match="initializer_timeout"):
        LocalProcessBackendConfig(initializer_timeout=5)  # type: ignore[call-arg]


def test_initializers_travel_with_all_that_they_were_given() -> None:
    initializer = Initializer(
        dataset=S3DatasetInitializer("s3://bucket/rows", endpoint="http://127.0.0.1:1", region="r"),
        model=HuggingFaceModelInitializer("hf://org/model", ignore_patterns=None, access_token="t"),
    )
    assert compiled(CustomTrainer(func=nothing), initializer=initializer)["workload"]["initializers"] == {
        "dataset": {
            "type": "s3",
            "storage_uri": "s3://bucket/rows",
            "endpoint": "http://127.0.0.1:1",
            "region": "r",
        },
        "model": {"type": "huggingface", "storage_uri": "hf://org/model", "ignore_patterns": None, "access_token": "t"},
    }
    cached = Initializer(dataset=DataCacheInitializer("cache://a/b", metadata_loc="s3://m/x", num_data_nodes=2))
    assert (
        compiled(CustomTrainer(func=nothing), initializer=cached)["workload"]["initializers"]["dataset"]["type"]
        == "cache"
    )
    swapped = Initializer(dataset=MODEL)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be the dataset"):
        compiled(CustomTrainer(func=nothing), initializer=swapped)
    with pytest.raises(ValueError, match="must be an Initializer"):
        compiled(CustomTrainer(func=nothing), initializer="hf://org/model")


def test_built_in_trainer_is_a_training() -> None:
    config = TorchTuneConfig(
        dtype=DataType.FP32,
        batch_size=4,
        epochs=2,
        loss=Loss.CEWithChunkedOutputLoss,
        peft_config=LoraConfig(apply_lora_to_mlp=True, lora_rank=8, lora_alpha=16, lora_dropout=0.0, use_dora=False),
        dataset_preprocess_config=TorchTuneInstructDataset(
            source=DataFormat.PARQUET, split="train", train_on_input=True, column_map={"input": "question"}
        ),
    )
    initializer = Initializer(
        dataset=HuggingFaceDatasetInitializer("hf://org/data", access_token="t"),
        model=S3ModelInitializer("s3://bucket/model", access_key_id="k", secret_access_key="s", region="r"),
    )
    document = compiled(BuiltinTrainer(config=config), runtime=TUNING, initializer=initializer)
    assert document["training_config"] == {
        "training_type": "LORA",
        "base_model": {"model_id": "s3://bucket/model", "dtype": "float32"},
        "hyperparameters": {
            "num_train_epochs": 2,
            "mixed_precision": "no",
            "completion_only_loss": False,
            "lora_r": 8,
            "lora_alpha": 16,
            "lora_dropout": 0.0,
            "use_dora": False,
            "lora_target_modules": "q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
        },
        "environment": {
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_REGION": "r",
            "HF_TOKEN": "t",
        },
    }
    assert document["data_config"] == {
        "sources": [{"path": "hf://org/data", "format": "parquet", "split": "train"}],
        "batch_size": 4,
        "preprocess": {"field_mapping": {"prompt": "question", "completion": "output"}},
    }


def test_built_in_trainer_takes_what_the_runtime_has() -> None:
    lora = runtime(
        "lora", trainer_type=TrainerType.BUILTIN_TRAINER, training_type="LORA", pretrained_model="hf://org/m"
    )
    document = compiled(BuiltinTrainer(TorchTuneConfig()), runtime=lora, initializer=Initializer(dataset=DATA))
    assert document["training_config"]["training_type"] == "LORA"
    assert document["training_config"]["base_model"] == {"model_id": "hf://org/m"}
    wide = BuiltinTrainer(TorchTuneConfig(num_nodes=2, resources_per_node={"gpu": 2}))
    spread = compiled(wide, runtime=TUNING, initializer=Initializer(dataset=DATA, model=MODEL))
    assert spread["training_config"]["framework"] == {"type": "FSDP"}
    assert spread["resource_config"] == {"node_count": 2, "gpu_count": 4}


@pytest.mark.parametrize(
    ("config", "initializer", "says"),
    [
        (TorchTuneConfig(), None, "which model"),
        (TorchTuneConfig(), Initializer(model=MODEL), "which data"),
        ("lora", None, "TorchTuneConfig"),
        (TorchTuneConfig(dtype="bf16"), Initializer(DATA, MODEL), "dtype"),  # type: ignore[arg-type]
        (TorchTuneConfig(loss="mse"), Initializer(DATA, MODEL), "loss"),  # type: ignore[arg-type]
        (TorchTuneConfig(peft_config=LoraConfig(quantize_base=True)), Initializer(DATA, MODEL), "quantize_base"),
        (TorchTuneConfig(peft_config=LoraConfig(lora_attn_modules=["wq"])), Initializer(DATA, MODEL), "wq"),
        (TorchTuneConfig(peft_config={}), Initializer(DATA, MODEL), "LoraConfig"),  # type: ignore[arg-type]
        (
            TorchTuneConfig(dataset_preprocess_config=TorchTuneInstructDataset(new_system_prompt="Be kind.")),
            Initializer(DATA, MODEL),
            "new_system_prompt",
        ),
        (
            TorchTuneConfig(dataset_preprocess_config=TorchTuneInstructDataset(source=DataFormat.XML)),
            Initializer(DATA, MODEL),
            "source",
        ),
        (
            TorchTuneConfig(dataset_preprocess_config=TorchTuneInstructDataset(column_map={"system": "s"})),
            Initializer(DATA, MODEL),
            "column_map",
        ),
        (
            TorchTuneConfig(),
            Initializer(HuggingFaceDatasetInitializer("hf://org/data", ignore_patterns=["*.csv"]), MODEL),
            "ignore_patterns",
        ),
        (TorchTuneConfig(), Initializer(S3DatasetInitializer("s3://b/c", role_arn="r"), MODEL), "role_arn"),
        (TorchTuneConfig(), Initializer(DataCacheInitializer("cache://a/b", "/m", 2), MODEL), "DataCacheInitializer"),
        (
            TorchTuneConfig(),
            Initializer(S3DatasetInitializer("s3://b/c", region="a"), S3ModelInitializer("s3://b/m", region="b")),
            "AWS_REGION",
        ),
    ],
)
def test_what_a_training_has_no_counterpart_for_is_refused_by_name(config: Any, initializer: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compiled(BuiltinTrainer(config), runtime=TUNING, initializer=initializer)


def test_trainers_and_runtimes_must_fit() -> None:
    with pytest.raises(ValueError, match="no trainer of its own"):
        compiled(BuiltinTrainer(TorchTuneConfig()), initializer=Initializer(DATA, MODEL))
    with pytest.raises(ValueError, match="takes a BuiltinTrainer"):
        compiled(CustomTrainer(func=nothing), runtime=TUNING)
    with pytest.raises(ValueError, match="not a str"):
        compiled("train.py")
    sft = runtime("sft", trainer_type=TrainerType.BUILTIN_TRAINER, training_type="SFT")
    with pytest.raises(ValueError, match="not an adapter"):
        compiled(
            BuiltinTrainer(TorchTuneConfig(peft_config=LoraConfig())), runtime=sft, initializer=Initializer(DATA, MODEL)
        )


def test_options_change_the_job_in_their_order() -> None:
    document = compiled(
        CustomTrainer(func=nothing),
        options=[Name("first"), Labels({"team": "a"}), Priority(3), ActiveDeadlineSeconds(60), Name("second")],
    )
    assert (document["name"], document["handle"]) == ("second", "second")
    assert document["labels"]["team"] == "a"
    assert document["scheduling_config"] == {"priority": 3, "max_runtime_seconds": 60}
    for wrong in ("Name", [Name], ["first"]):
        with pytest.raises(ValueError, match="option"):
            compiled(CustomTrainer(func=nothing), options=wrong)


def test_names_are_those_of_kubernetes() -> None:
    made = random_name()
    assert made[0].isalpha()
    assert len(made) == 12
    assert check_name(made) == made
    for wrong in ("UPPER", "-a", "a-", "a_b", "a" * 64, "", "a/b", None):
        for kind in (ValueError, RuntimeError):
            with pytest.raises(kind, match="no name"):
                check_name(wrong)


@pytest.mark.parametrize("definition", built_in().runtimes.values(), ids=lambda each: each.name)
def test_every_built_in_runtime_makes_a_job(definition: TrainingRuntime) -> None:
    if definition.trainer_type is TrainerType.BUILTIN_TRAINER:
        trainer: object = BuiltinTrainer(TorchTuneConfig(epochs=1))
    else:
        trainer = CustomTrainer(func=nothing)
    try:
        compiled(trainer, runtime=definition, initializer=Initializer(DATA, MODEL))
    except TrainmasterError as error:
        raise AssertionError(f"{error}: {error.problems}") from error


def test_job_on_kubernetes_is_a_train_job_of_a_runtime_of_the_cluster() -> None:
    def on_kubernetes(**arguments: Any) -> Any:
        function = CustomTrainer(func=nothing, image="i:1")
        options = [Labels({"team": "a"}), Annotations({"note": "b c"})]
        document = compiled(function, kind="kubernetes", backend="k8s", **{"options": options, **arguments})
        assert document["backend"] == "k8s"
        return document["workload"].get("kubernetes")

    objects = {"labels": {"team": "a"}, "annotations": {"note": "b c"}}
    found = runtime("wide", kind=RuntimeKind.CLUSTER_TRAINING_RUNTIME, in_cluster=True)
    assert on_kubernetes(runtime=found) == {"runtime": "wide", "runtime_kind": "ClusterTrainingRuntime", **objects}
    # One of the server, which no cluster knows.
    assert on_kubernetes(runtime=replace(found, in_cluster=False)) == objects
    assert on_kubernetes(runtime=replace(found, in_cluster=False), options=[]) is None
    tuned = compiled(
        BuiltinTrainer(TorchTuneConfig()),
        kind="kubernetes",
        initializer=Initializer(DATA, MODEL),
        runtime=replace(TUNING, in_cluster=True),
    )
    assert tuned["workload"]["kubernetes"]["runtime"] == "tuning"


def test_runtime_patches_that_kubeflows_own_options_set_are_taken_on_kubernetes() -> None:
    patch = {"trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [{"name": "node"}]}}}}

    def option(job: Any, trainer: object, backend: object) -> None:
        job.setdefault("spec", {})["runtimePatches"] = [patch]

    function = CustomTrainer(func=nothing, image="i:1")
    document = compiled(function, kind="kubernetes", options=[option])
    assert document["workload"]["kubernetes"] == {"runtime_patches": [patch]}
    with pytest.raises(ValueError, match="objects of a Kubernetes cluster"):
        compiled(function, options=[option])
