"""Trainings: what a job without a workload compiles to, and what is refused before it is stored."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

import pytest

from spec_documents import CUSTOM, LORA, changed
from trainmaster.backends import capabilities_of
from trainmaster.protocol.launch import Launch, LaunchStep
from trainmaster.server.coordinator.admission import Admission
from trainmaster.server.core.errors import RefusedError, SpecError
from trainmaster.server.core.fields import MAX_PATH_DEPTH
from trainmaster.server.core.spec.documents import SPEC_VERSION, dump, load_stored, parse_submit
from trainmaster.server.core.spec.submit import compile_job
from trainmaster.server.core.training.hyperparameters import Value, read_hyperparameters
from trainmaster.server.core.training.types import FrameworkType, TrainingType

DIGEST = "0" * 64
SHARDED = {"strategy": "fsdp", "world_size": 2}


def launch(document: dict[str, Any]) -> Launch:
    return compile_job(parse_submit(document)).launch


def training(document: dict[str, Any]) -> Any:
    return json.loads(launch(document).inputs["training.json"])


def with_values(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    for path, value in changes.items():
        document = changed(document, path.replace("__", "."), value)
    return document


def refused(**changes: Any) -> dict[str, str]:
    with pytest.raises(RefusedError) as caught:
        parse_submit(with_values(LORA, **changes))
    return {problem.field: problem.message for problem in caught.value.problems}


def test_training_is_prepared_with_the_callers_tokens_and_then_trained_without() -> None:
    compiled = launch(LORA)
    assert compiled.steps == (
        LaunchStep(name="prepare", argv=("-s", "-P", "-m", "trainmaster.training.prepare"), python=True, tokens=True),
        LaunchStep(name="train", argv=("-P", "-m", "trainmaster.training"), python=True),
    )
    assert (compiled.kind, compiled.reports_phases, compiled.can_save) == ("trainer", True, True)
    assert compiled == compile_job(load_stored(SPEC_VERSION, dump(parse_submit(LORA)))).launch


def test_training_has_a_rank_for_each_gpu_or_as_many_as_it_says() -> None:
    assert launch(LORA).ranks_per_node == 1
    assert launch({**LORA, "resource_config": {"gpu_count": 8, "node_count": 2}}).ranks_per_node == 4
    document = with_values(LORA, training_config__framework={"distributed": {"world_size": 2}})
    assert launch({**document, "resource_config": {"gpu_count": 0}}).ranks_per_node == 2


def test_training_named_explicitly_ships_files_and_is_the_same_otherwise() -> None:
    workload = {"kind": "trainer", "files": [{"path": "data/a.jsonl", "sha256": DIGEST}], "grace_period_s": 90.0}
    document = with_values({**LORA, "workload": workload}, data_config__sources=[{"path": "data/a.jsonl"}])
    compiled = launch({**document, "resource_config": {"gpu_count": 2}})
    assert [blob.path for blob in compiled.blobs] == ["data/a.jsonl"]
    assert (compiled.ranks_per_node, compiled.grace_s, compiled.can_save) == (2, 90.0, True)
    assert compiled.steps == launch(LORA).steps


def test_custom_script_named_explicitly_ships_files_too() -> None:
    files = [{"path": name, "sha256": DIGEST} for name in ("train.py", "rows.jsonl")]
    document = with_values(
        {**CUSTOM, "workload": {"kind": "trainer", "files": files, "environment": {"A": "b"}}},
        training_config__framework__custom_script_path="train.py",
        data_config__sources=[{"path": "./rows.jsonl"}],
    )
    compiled = launch(document)
    assert compiled.kind == parse_submit(document).effective_workload.kind == "script"
    assert [step.argv[-1] for step in compiled.steps] == ["trainmaster.training.fetching", "train.py"]
    assert ([blob.path for blob in compiled.blobs], set(compiled.secrets)) == (["train.py", "rows.jsonl"], {"A"})


def test_document_of_a_training_is_complete_and_typed() -> None:
    document = with_values(
        LORA,
        training_config__hyperparameters={"learning_rate": 1e-3, "lora_r": 4},
        training_config__base_model={"model_id": "s3://bucket/model"},
        data_config__validation_split=0.1,
        output_config={"checkpoint": {"save_steps": 7}},
    )
    found = training(document)
    parameters = found["training_config"]["hyperparameters"]
    assert (parameters["learning_rate"], parameters["lora_r"], parameters["lora_alpha"]) == (0.001, 4, 32.0)
    assert (parameters["eval_strategy"], parameters["eval_steps"]) == ("epoch", 7)
    assert found["training_config"]["base_model"]["source"] == "s3"
    assert found["data_config"]["preprocess"]["packing"] is False
    assert set(found) == {"name", "training_config", "data_config", "output_config", "resource_config"}


def test_source_for_validation_is_evaluated_after_each_epoch() -> None:
    sources = [{"path": "hf://org/data"}, {"path": "hf://org/held-out", "validation": True}]
    found = training(with_values(LORA, data_config__sources=sources))
    assert found["training_config"]["hyperparameters"]["eval_strategy"] == "epoch"


def test_document_of_a_training_holds_no_secret() -> None:
    document = with_values(LORA, training_config__environment={"A": "hunter2"}, output_config__hub_token="hunter2")
    text = launch(document).inputs["training.json"]
    assert "hunter2" not in text
    assert "environment" not in json.loads(text)["training_config"]
    assert "hub_token" not in json.loads(text)["output_config"]
    stored = load_stored(SPEC_VERSION, dump(parse_submit(document)))
    assert "secret:" not in compile_job(stored).launch.inputs["training.json"]


def test_pre_training_packs_unless_told_otherwise() -> None:
    document = with_values(LORA, training_config__training_type="CONTINUED_PRETRAIN")
    assert training(document)["data_config"]["preprocess"]["packing"] is True
    document = with_values(document, data_config__preprocess={"packing": False})
    assert training(document)["data_config"]["preprocess"]["packing"] is False


def test_custom_script_gets_its_hyperparameters_as_they_are() -> None:
    document = with_values(CUSTOM, training_config__hyperparameters={"anything": 1, "learning_rate": "fast"})
    assert training(document)["training_config"]["hyperparameters"] == {"anything": "1", "learning_rate": "fast"}


def test_training_without_its_configs_is_refused() -> None:
    with pytest.raises(SpecError) as caught:
        parse_submit({"name": "n", "workload": {"kind": "trainer"}})
    assert {problem.field for problem in caught.value.problems} == {"training_config", "data_config"}


def test_unknown_hyperparameter_is_refused_by_its_name() -> None:
    field = "training_config.hyperparameters.learning_rat"
    assert refused(training_config__hyperparameters={"learning_rat": 1}) == {
        field: "unknown hyperparameter; did you mean 'learning_rate'?"
    }


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"output_config__export_format": "gguf"}, "output_config.export_format", "not available in this version"),
        ({"output_config__export_format": "pytorch"}, "output_config.export_format", "not available in this version"),
        (
            {"output_config": {"push_to_hub": True, "hub_repo_id": "a/b"}},
            "output_config.push_to_hub",
            "not available in this version",
        ),
        (
            {"training_config__training_type": "SFT", "output_config__export_format": "adapter"},
            "output_config.export_format",
            "adapter is for LORA",
        ),
        (
            {"output_config": {"merge_lora": True, "export_format": "adapter"}},
            "output_config.merge_lora",
            "set one of the two",
        ),
        ({"output_config__output_path": "results"}, "output_config.output_path", "absolute path"),
        ({"output_config__output_path": "gs://bucket/m"}, "output_config.output_path", "s3:// URI"),
        (
            {"training_config__framework": {"type": "FSDP"}},
            "training_config.framework.distributed.world_size",
            "at least two ranks",
        ),
        (
            {"training_config__framework": {"type": "ENGINE", "distributed": {"strategy": "fsdp"}}},
            "training_config.framework.distributed.world_size",
            "at least two ranks",
        ),
        (
            {
                "training_config__framework": {
                    "type": "ENGINE",
                    "distributed": SHARDED | {"config": {"cpu_offload": 1}},
                },
            },
            "training_config.framework.distributed.config.cpu_offload",
            "use framework type HF_TRAINER",
        ),
        (
            {
                "training_config__framework": {
                    "type": "ENGINE",
                    "distributed": SHARDED | {"config": {"reshard_after_forward": 4}},
                },
            },
            "training_config.framework.distributed.config.reshard_after_forward",
            "is 4, and the engine has true or false",
        ),
        (
            {"training_config__framework": {"distributed": SHARDED | {"config": {"ddp_timeout": 4}}}},
            "training_config.framework.distributed.config.ddp_timeout",
            "unknown option 'ddp_timeout'",
        ),
        (
            {
                "training_config__framework": {"distributed": SHARDED},
                "training_config__hyperparameters": {"optim": "adafactor"},
            },
            "training_config.hyperparameters.optim",
            "adafactor needs whole weights",
        ),
        (
            {
                "training_config__framework": {"distributed": SHARDED},
                "training_config__hyperparameters": {"mixed_precision": "fp8"},
            },
            "training_config.hyperparameters.mixed_precision",
            "weights of 8 bits are not sharded",
        ),
        (
            {
                "training_config__framework": {"distributed": SHARDED | {"backend": "gloo"}},
                "resource_config": {"gpu_count": 2},
            },
            "training_config.framework.distributed.backend",
            "use nccl",
        ),
        (
            {"training_config__framework": {"type": "FSDP", "distributed": {"strategy": "ddp", "world_size": 2}}},
            "training_config.framework.distributed.strategy",
            "use fsdp or fsdp2",
        ),
        (
            {"data_config__preprocess": {"field_mapping": {"promt": "question"}}},
            "data_config.preprocess.field_mapping.promt",
            "did you mean 'prompt'?",
        ),
        (
            {"training_config__framework": {"config": {"eval_delai": "1"}}},
            "training_config.framework.config.eval_delai",
            "did you mean 'eval_delay'?",
        ),
        (
            {"training_config__framework": {"config": {"seed": "1"}}},
            "training_config.framework.config.seed",
            "set data_config.seed instead",
        ),
        (
            {"training_config__framework": {"config": {"lora_r": "1"}}},
            "training_config.framework.config.lora_r",
            "set hyperparameters.lora_r instead",
        ),
        (
            {"training_config__framework": {"distributed": {"config": {"cpu_offload": "true"}}}},
            "training_config.framework.distributed.config.cpu_offload",
            "unknown option 'cpu_offload'; choices: ddp_",
        ),
        (
            {"training_config__framework": {"distributed": {"strategy": "zero3"}}},
            "training_config.framework.distributed.strategy",
            "use ddp",
        ),
        (
            {"training_config__framework": {"distributed": {"backend": "mpi"}}},
            "training_config.framework.distributed.backend",
            "nccl or gloo",
        ),
        (
            {"training_config__base_model": {"model_id": "a/b", "model_kwargs": {"trust_remote_code": True}}},
            "training_config.base_model.model_kwargs.trust_remote_code",
            "base_model.trust_remote_code",
        ),
        (
            {"training_config__base_model": {"model_id": "a/b", "model_kwargs": {"weights_only": False}}},
            "training_config.base_model.model_kwargs.weights_only",
            "safetensors alone",
        ),
        (
            {"training_config__base_model": {"model_id": "a/b", "model_kwargs": {"subfolder": "../../other"}}},
            "training_config.base_model.model_kwargs.subfolder",
            "say what is loaded",
        ),
        (
            {"data_config__preprocess": {"tokenizer_config": {"vocab_file": "/etc/passwd"}}},
            "data_config.preprocess.tokenizer_config.vocab_file",
            "say what is loaded",
        ),
        (
            {"data_config__preprocess": {"tokenizer_config": {"trust_remote_code": True}}},
            "data_config.preprocess.tokenizer_config.trust_remote_code",
            "base_model.trust_remote_code",
        ),
        (
            {"training_config__hyperparameters": {"eval_strategy": "steps"}},
            "training_config.hyperparameters.eval_strategy",
            "validation_split, or validation of a source",
        ),
        (
            {
                "output_config__checkpoint": {"metric_for_best_model": "eval_los"},
                "data_config__validation_split": 0.5,
            },
            "output_config.checkpoint.metric_for_best_model",
            "did you mean 'eval_loss'?",
        ),
        (
            {"output_config__checkpoint": {"metric_for_best_model": "eval_loss"}},
            "output_config.checkpoint.metric_for_best_model",
            "validation_split",
        ),
        (
            {
                "output_config__checkpoint": {"metric_for_best_model": "loss"},
                "data_config__validation_split": 0.1,
                "training_config__hyperparameters": {"early_stopping_patience": "2"},
            },
            "training_config.hyperparameters.early_stopping_patience",
            "set output_config.checkpoint.metric_for_best_model, to eval_loss for example",
        ),
        (
            {
                "output_config__checkpoint": {"metric_for_best_model": "eval_loss"},
                "data_config__validation_split": 0.1,
                "training_config__hyperparameters": {"eval_strategy": "no"},
            },
            "output_config.checkpoint.metric_for_best_model",
            "measured by evaluations",
        ),
    ],
)
def test_what_no_built_in_trainer_does_is_refused(changes: dict[str, Any], field: str, says: str) -> None:
    problems = refused(**changes)
    assert set(problems) == {field}
    assert says in problems[field]


@pytest.mark.parametrize("training_type", ["QLORA", "RLHF"])
def test_type_of_a_later_version_is_refused(training_type: str) -> None:
    with pytest.raises(RefusedError, match=f"{training_type} is not available in this version"):
        parse_submit(with_values(LORA, training_config__training_type=training_type))
    assert parse_submit(with_values(CUSTOM, training_config__training_type=training_type))


@pytest.mark.parametrize(
    "changes",
    [
        {"output_config__merge_lora": True},  # of the adapter that it was an example of
        {"training_config__priority": 3, "scheduling_config": {"priority": 4}},
        {"training_config__framework": {"distributed": {"world_size": 3}}, "resource_config": {"gpu_count": 2}},
        {"training_config__hyperparameters": {"reward": "0.1"}},
    ],
)
def test_refusal_of_a_type_stands_alone_whatever_else_the_job_says(changes: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match="training_type RLHF is not available in this version") as caught:
        parse_submit(with_values(LORA, training_config__training_type="RLHF", **changes))
    assert "merge_lora" not in caught.value.message


@pytest.mark.parametrize("training_type", list(TrainingType))
@pytest.mark.parametrize(
    ("framework", "ranks"),
    # FSDP with one rank is wrong by itself.
    [(each, ranks) for each in FrameworkType for ranks in (1, 2) if (each, ranks) != (FrameworkType.FSDP, 1)],
)
def test_every_choice_that_a_refusal_offers_is_accepted(
    framework: FrameworkType, training_type: TrainingType, ranks: int
) -> None:
    """Whatever is asked for, the job is accepted with each framework and each training type that the error names."""

    def asking(framework: str, training_type: str) -> dict[str, Any]:
        named: dict[str, Any] = {"type": framework}
        if framework == "CUSTOM":
            named["custom_script_path"] = "/srv/train.py"
        document = with_values(LORA, training_config__framework=named, training_config__training_type=training_type)
        return {**document, "resource_config": {"gpu_count": ranks}}

    def message(document: dict[str, Any]) -> str | None:
        try:
            parse_submit(document)
        except (RefusedError, SpecError) as error:
            return error.message
        return None

    said = message(asking(framework, training_type))
    if said is None:
        assert framework not in (FrameworkType.DEEPSPEED, FrameworkType.MEGATRON)
        return
    words = set(re.findall(r"[A-Z_]{3,}", said.partition("(with several GPUs")[0]))
    offered = [(str(each), str(training_type)) for each in FrameworkType if each in words - {framework}]
    offered += [(str(framework), str(each)) for each in TrainingType if each in words - {training_type}]
    assert offered
    for choice in offered:
        assert message(asking(*choice)) is None, f"{said} -> {choice}"


@pytest.mark.parametrize(
    ("field", "wrong", "base"),
    [
        ("training_config.framework.type", "DEEPSEED", LORA),
        ("training_config.training_type", "QLORAA", LORA),
        ("training_config.training_type", "QLORAA", CUSTOM),
        ("output_config.export_format", "gguff", LORA),
        ("output_config.export_format", "gguf", LORA),
        ("output_config.export_format", "gguf", changed(LORA, "training_config.training_type", "SFT")),
        ("output_config.export_format", "pytorch", changed(LORA, "output_config.merge_lora", True)),
        ("output_config.checkpoint.metric_for_best_model", "accuracy", LORA),
        (
            "output_config.checkpoint.metric_for_best_model",
            "accuracy",
            changed(LORA, "data_config.validation_split", 0.5),
        ),
        ("training_config.framework.distributed.strategy", "zero3", LORA),
        ("training_config.framework.distributed.backend", "mpi", LORA),
        ("data_config.sources[0].type", "hugging", LORA),
    ],
)
def test_every_value_that_an_error_offers_is_accepted(field: str, wrong: str, base: dict[str, Any]) -> None:
    document = changed(base, "resource_config.gpu_count", 2)
    with pytest.raises((RefusedError, SpecError)) as caught:
        parse_submit(changed(document, field, wrong))
    offer = re.split(r"hoices: |; use |: use |must be one of ", caught.value.message)[-1]
    offered = re.findall(r"\b(?!or\b|leave\b|it\b|out\b)[A-Za-z_]+\b", offer)
    assert offered
    assert wrong not in offered
    for value in offered:
        other = changed(document, field, value)
        if value == "CUSTOM":
            other = changed(other, "training_config.framework.custom_script_path", "/srv/train.py")
        parse_submit(other)


@pytest.mark.parametrize("framework", ["DEEPSPEED", "MEGATRON"])
def test_framework_without_a_trainer_is_refused_at_submission(framework: str) -> None:
    with pytest.raises(RefusedError, match=f"framework {framework} is not available in this version, installed or not"):
        parse_submit(with_values(LORA, training_config__framework={"type": framework}))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data_config__sources": [{"path": "rows.jsonl"}]}, "data_config.sources[0].path"),
        ({"training_config__base_model__model_id": "./model"}, "training_config.base_model.model_id"),
        ({"training_config__base_model__source": "local"}, "training_config.base_model.model_id"),
        ({"training_config__base_model__tokenizer_id": "./model"}, "training_config.base_model.tokenizer_id"),
        ({"data_config__preprocess": {"tokenizer_id": "~/t"}}, "data_config.preprocess.tokenizer_id"),
    ],
)
def test_relative_path_that_is_not_shipped_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_submit(with_values(LORA, **changes))
    assert [problem.field for problem in caught.value.problems] == [field]
    assert "trainmaster submit" in caught.value.problems[0].message


@pytest.mark.parametrize("path", ["model", "./model", "model/config.json", "mod*/conf*.json"])
def test_relative_path_of_a_shipped_file_or_directory_is_taken(path: str) -> None:
    workload = {"kind": "trainer", "files": [{"path": "model/config.json", "sha256": DIGEST}]}
    document = with_values({**LORA, "workload": workload}, data_config__sources=[{"path": path}])
    assert parse_submit(document)


@pytest.mark.parametrize("path", ["other", "other/*.json", "*/../../other/*.json", "model/../../*"])
def test_relative_path_beside_the_shipped_files_is_refused(path: str) -> None:
    workload = {"kind": "trainer", "files": [{"path": "model/config.json", "sha256": DIGEST}]}
    with pytest.raises(SpecError, match=r"there is no such file: .* looked for among the shipped files"):
        parse_submit(with_values({**LORA, "workload": workload}, data_config__sources=[{"path": path}]))


def test_many_paths_are_looked_for_among_many_shipped_files_at_once() -> None:
    files = [{"path": f"data/{number}.jsonl", "sha256": DIGEST} for number in range(8192)]
    sources = [{"path": f"other/{number}*.jsonl"} for number in range(1024)]
    document = with_values({**LORA, "workload": {"kind": "trainer", "files": files}}, data_config__sources=sources)
    with pytest.raises(SpecError) as caught:
        parse_submit(document)
    assert len(caught.value.problems) == len(sources)


def test_shipped_file_below_very_many_directories_is_refused() -> None:
    deep = "/".join(["d"] * MAX_PATH_DEPTH)
    files = [{"path": f"{deep}/f", "sha256": DIGEST}, {"path": f"{deep}/d/f", "sha256": DIGEST}]
    with pytest.raises(SpecError) as caught:
        parse_submit({**LORA, "workload": {"kind": "trainer", "files": files}})
    assert [problem.field for problem in caught.value.problems] == ["workload.files[1].path"]


def test_files_below_thousands_of_directories_are_checked_in_no_time() -> None:
    files = [
        {"path": f"{number}/{'d/' * (MAX_PATH_DEPTH - 1)}{name}", "sha256": DIGEST}
        for number in range(4095)
        for name in ("f", "h")
    ]
    files += [{"path": "8/d", "sha256": DIGEST}, {"path": "9/d/d", "sha256": DIGEST}]
    began = time.thread_time()
    with pytest.raises(SpecError) as caught:
        parse_submit({**LORA, "workload": {"kind": "trainer", "files": files}})
    # By objects for each directory it took 4 s.
    assert time.thread_time() - began < 2.0
    assert {problem.message for problem in caught.value.problems} == {
        "'8/d' is a file too, so nothing can lie below it",
        "'9/d/d' is a file too, so nothing can lie below it",
    }


def test_ranks_of_a_training_are_not_set_beside_its_world_size() -> None:
    with pytest.raises(SpecError) as caught:
        parse_submit({**LORA, "workload": {"kind": "trainer", "ranks_per_node": 4}})
    assert [problem.field for problem in caught.value.problems] == ["workload.ranks_per_node"]


def test_training_document_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[TrainingType] = []

    def counted(training_type: TrainingType, given: Mapping[str, str]) -> dict[str, Value]:
        read.append(training_type)
        return read_hyperparameters(training_type, given)

    monkeypatch.setattr("trainmaster.server.core.workloads.trainer.read_hyperparameters", counted)
    request = parse_submit(LORA, seed=7)
    submitted = Admission(backends={"local": capabilities_of("local")}, installed=lambda _: True).compile(request, "a")
    document = json.loads(submitted.launch.inputs["training.json"])
    assert document["data_config"]["seed"] == 7
    assert read == [TrainingType.LORA]
