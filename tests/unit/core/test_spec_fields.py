"""Every field of a submission: its default, what it takes and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from spec_documents import COMMAND, CUSTOM, LORA, at, changed
from trainmaster.server.core.errors import SpecError
from trainmaster.server.core.spec.documents import parse_submit, redacted
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.workloads import WorkloadSpec

REQUIRED = object()

# Path -> (default, values that are taken, values that are refused).
FIELDS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "name": (REQUIRED, ["n", "x" * 128], ["", "   ", "x" * 129, 3, None, "a\nb"]),
    "handle": (None, ["a", "7", "my-run-7", "x" * 63], ["", "A", "-a", "a-", "a_b", "x" * 64, "a.b"]),
    "labels": (
        {},
        [{"team": "a"}, {"a.b/c_d-9": ""}, {"k" * 63: "v" * 256}, {str(i): "" for i in range(64)}],
        [
            {"": "a"},
            {"k" * 64: "a"},
            {"a b": "c"},
            {"a": "v" * 257},
            {"a": None},
            {"type": "x"},
            {"system/x": "y"},
            {str(i): "" for i in range(65)},
            [],
        ],
    ),
    "backend": (None, ["local"], ["", 3]),
    "training_config.training_type": (
        REQUIRED,
        ["SFT", "LORA", "QLORA", "DPO", "RLHF", "CONTINUED_PRETRAIN", "FULL_FINETUNE"],
        ["sft", "", None, 1],
    ),
    "training_config.base_model.model_id": (REQUIRED, ["org/model", "/models/m"], ["", " ", None, 1]),
    "training_config.base_model.revision": (None, ["main"], ["", 1]),
    "training_config.base_model.source": (
        None,
        ["huggingface", "scaiatlas", "s3", "url"],
        ["HuggingFace", "gcs"],
    ),
    "training_config.base_model.tokenizer_id": (None, ["org/tokenizer"], [""]),
    "training_config.base_model.dtype": ("auto", ["float32", "float16", "bfloat16", "auto"], ["fp8", 16]),
    "training_config.base_model.trust_remote_code": (False, [True], ["true", 1, None]),
    "training_config.base_model.model_kwargs": ({}, [{"a": "b"}], [{"a": []}, {"a": None}, "a"]),
    "training_config.framework.type": ("AUTO", ["CUSTOM"], ["custom", "TRL", None]),
    "training_config.framework.config": ({}, [{"a": "b"}], [[]]),
    "training_config.framework.distributed.world_size": (None, [1, 8], [0, -1, 1.5, "4", True]),
    "training_config.framework.distributed.backend": ("nccl", ["nccl", "gloo", "mpi"], ["NCCL", "ucx", None]),
    "training_config.framework.distributed.strategy": (None, ["ddp", "zero3"], ["", 3]),
    "training_config.framework.distributed.config": ({}, [{"a": "b"}], [3]),
    "training_config.framework.custom_script_path": (
        None,
        ["/srv/train.py", "/srv/train.sh"],
        [None, "", "train.py", "../train.py", "/srv/../train.py", "a\x00b"],
    ),
    "training_config.hyperparameters": ({}, [{"learning_rate": "1e-4"}], [{"a": {}}, None]),
    "training_config.environment": (
        {},
        [{"A": "b", "_a9": ""}, {"A": "two\nlines"}],
        [{"9A": "b"}, {"A-B": "c"}, {"": "c"}, {"TRAINMASTER_JOB_ID": "x"}, {"A": "\x00"}, {"A": None}],
    ),
    "training_config.resume_from_checkpoint": (None, ["ckpt-1"], ["", 1]),
    "training_config.max_retries": (0, [0, 100], [-1, 101, "1", None]),
    "training_config.priority": (5, [0, 10], [-1, 11, 5.5, "5", None]),
    "data_config.sources": (
        REQUIRED,
        [[{"path": "/data/a.jsonl"}], [{"path": "hf://a"}, {"path": "s3://b"}]],
        [[], None, {}],
    ),
    "data_config.sources[0].path": (
        REQUIRED,
        ["file:///a", "hf://a/b", "s3://a", "http://a", "https://a", "scaidrive://a", "scaiatlas://a", "/a/b"],
        ["", "gs://a", "htp://a", None],
    ),
    "data_config.sources[0].type": (None, ["dataset"], ["", 1]),
    "data_config.sources[0].split": (None, ["train"], ["", 1]),
    "data_config.sources[0].format": (None, ["jsonl", "json", "csv", "parquet", "text", "arrow"], ["xml", "JSON"]),
    "data_config.sources[0].columns": (None, [["a", "b"], []], ["a", [1], [""]]),
    "data_config.sources[0].filters": (
        None,
        [
            [],
            [{"column": "a", "op": "gt", "value": 1}, {"column": "b", "op": "is_null", "value": None}],
            [{"column": "a", "op": "not_in", "value": ["x", 1, 0.5, True]}],
            [{"column": "a", "op": "matches", "value": r"^\w+$"}],
        ],
        [
            "a > 1",
            1,
            [float("nan")],
            [{"column": "a", "op": "gt"}],
            [{"column": "a", "op": "like", "value": "x"}],
            [{"column": "", "op": "eq", "value": 1}],
            [{"column": "a", "op": "eq", "value": float("nan")}],
            [{"column": "a", "op": "eq", "value": "\ud800"}],
            [{"column": "a", "op": "eq", "value": {"b": 1}}],
            [{"column": "a", "op": "eq", "value": [1]}],
            [{"column": "a", "op": "in", "value": 1}],
            [{"column": "a", "op": "in", "value": []}],
            [{"column": "a", "op": "lt", "value": True}],
            [{"column": "a", "op": "not_null", "value": 1}],
            [{"column": "a", "op": "matches", "value": "("}],
            [{"column": "a", "op": "matches", "value": "x" * 1001}],
        ],
    ),
    "data_config.sources[0].filters[0].column": (REQUIRED, ["a", "a b"], ["", None, 1]),
    "data_config.sources[0].filters[0].op": (REQUIRED, ["eq", "ne", "lt", "le", "gt", "ge"], ["EQ", "=>", None, []]),
    "data_config.sources[0].filters[0].value": (None, ["x", 1, 0.5], [None, {}, [1]]),
    "data_config.sources[0].sampling": (None, [{}], [1, "all"]),
    "data_config.sources[0].sampling.weight": (None, [0.5, 2], [0, -1, "1", float("inf")]),
    "data_config.sources[0].sampling.ratio": (None, [0.1, 1], [0, 1.1]),
    "data_config.sources[0].sampling.max_samples": (None, [1], [0, 1.5]),
    "data_config.sources[0].validation": (False, [False], ["yes", 1, None]),
    "data_config.preprocess.tokenizer_id": (None, ["org/tokenizer"], [""]),
    "data_config.preprocess.tokenizer_config": ({}, [{"use_fast": "true"}], [[]]),
    "data_config.preprocess.add_bos": (None, [True, False], ["yes", 1]),
    "data_config.preprocess.add_eos": (None, [True, False], ["yes", 1]),
    "data_config.preprocess.padding": (None, ["none", "longest", "max_length"], ["left", 1]),
    "data_config.preprocess.truncation": (None, [True, False], ["longest", 1]),
    "data_config.preprocess.chat_template": (None, ["{% for m in messages %}\n{{ m }}\n{% endfor %}"], [1]),
    "data_config.preprocess.field_mapping": ({}, [{"prompt": "question"}], [{"a": []}]),
    "data_config.preprocess.packing": (None, [True, False], ["yes", 1]),
    "data_config.max_seq_length": (None, [1, 4096], [0, "1"]),
    "data_config.batch_size": (1, [1, 64], [0, 1.5]),
    "data_config.gradient_accumulation_steps": (1, [1, 8], [0, None]),
    "data_config.num_workers": (0, [0, 4], [-1]),
    "data_config.pin_memory": (None, [True, False], ["on"]),
    "data_config.validation_split": (0.0, [0.0, 0.25, 0.999], [-0.1, 1.0, 1, "0.1", float("nan")]),
    "data_config.seed": (None, [0, 2**32 - 1], [-1, 2**32, "1"]),
    "resource_config.gpu_count": (None, [0, 1, 64], [-1, 1.5, "1", 10**30]),
    "resource_config.gpu_type": (None, ["A100-80GB", "mig-1g.5gb"], ["", 1]),
    "resource_config.gpu_memory_min_mb": (None, [0, 80_000], [-1, 10**30]),
    "resource_config.cpu_cores": (None, [1, 8], [0, 1.5]),
    "resource_config.ram_min_mb": (None, [0, 1024], [-1]),
    "resource_config.storage_min_mb": (None, [0, 1024], [-1]),
    "resource_config.node_affinity": ([], [["zone=a", "fast"]], ["fast", [""], ["=a"], [1]]),
    "resource_config.node_anti_affinity": ([], [["zone=a", "fast"]], ["fast", [""], ["=a"]]),
    "resource_config.node_count": (1, [1, 2], [0, -1, "2", None, 10**9]),
    "output_config.output_model_name": (None, ["m"], [""]),
    "output_config.output_path": (None, ["s3://bucket/m"], [""]),
    "output_config.checkpoint.save_strategy": ("steps", ["steps", "epoch"], ["epochs", "STEPS", None]),
    "output_config.checkpoint.save_steps": (500, [1], [0, None]),
    "output_config.checkpoint.save_total_limit": (3, [1], [0, None]),
    "output_config.checkpoint.metric_for_best_model": (None, ["eval_loss"], [""]),
    "output_config.checkpoint.greater_is_better": (None, [True, False], ["no"]),
    "output_config.checkpoint.save_on_each_node": (False, [True], ["yes", None]),
    "output_config.checkpoint.resume_from_best": (False, [False], ["yes", True]),
    "output_config.push_to_hub": (False, [False], ["yes", True]),
    "output_config.hub_repo_id": (None, [None], ["", "org/m"]),
    "output_config.hub_token": (None, [], [1, "t" * 5000]),
    "output_config.export_format": ("safetensors", ["safetensors", "adapter"], ["onnx"]),
    "output_config.merge_lora": (False, [True], ["yes"]),
    "scheduling_config.queue": ("default", ["research"], ["", None]),
    "scheduling_config.priority": (5, [0, 10], [-1, 11, "5", None]),
    "scheduling_config.preemptible": (False, [True], ["yes"]),
    "scheduling_config.max_runtime_seconds": (None, [1, 86_400], [0, 1.5]),
    "scheduling_config.required_capabilities": ([], [["nvlink"]], ["nvlink", [""]]),
    "scheduling_config.allow_waiting_for_nodes": (False, [True], ["yes"]),
    "scheduling_config.max_retries": (0, [0, 100], [-1, 101, "1", None]),
}

# Path -> (default, values that are taken, values that are refused), for what all workload kinds share.
DIGEST = "0" * 64
WORKLOAD_FIELDS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "environment": ({}, [{"A": "b"}], [{"9": "b"}, {"TRAINMASTER_URL": "x"}, {"A": "\x00"}]),
    "working_directory": (None, ["/srv/project"], ["project", "", "/srv/../etc"]),
    "remove_working_directory": (False, [True], ["yes", None]),
    "ranks_per_node": (1, [1, 8], [0, "2", 2000]),
    "can_save": (None, [True, False], ["yes"]),
    "grace_period_s": (None, [0, 0.5, 86_400], [-1, 86_401, "30", float("nan")]),
    "retry_exit_codes": ([], [[1, 255]], [[0], [256], 1]),
    "resume_from_checkpoint": (None, ["ckpt-1"], ["", 1]),
    "files": (
        [],
        [[{"path": "a/b.py", "sha256": DIGEST, "executable": True}]],
        [
            [{"path": "/a", "sha256": DIGEST, "executable": False}],
            [{"path": "a/../b", "sha256": DIGEST, "executable": False}],
            [{"path": "./a", "sha256": DIGEST, "executable": False}],
            [{"path": "a//b", "sha256": DIGEST, "executable": False}],
            [{"path": "a", "sha256": DIGEST[1:], "executable": False}],
            [{"path": "a", "sha256": "A" * 64, "executable": False}],
            [{"path": "a", "sha256": DIGEST}, {"path": "a", "sha256": DIGEST}],
            [{"path": "a", "sha256": DIGEST}, {"path": "a/b", "sha256": DIGEST}],
        ],
    ),
}


def model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := model_in(part))), None)


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = model_in(field.annotation)
        if inner is WorkloadSpec:
            continue
        many = "tuple" in str(field.annotation)
        if inner is None or many or (type(None) in get_args(field.annotation) and "_config" not in name):
            yield prefix + name
        if inner is not None:
            yield from leaves(inner, f"{prefix}{name}{'[0]' if many else ''}.")


def base_for(path: str) -> dict[str, Any]:
    document = with_parts(CUSTOM, path)
    if path.endswith("greater_is_better"):
        return changed(document, "output_config.checkpoint.metric_for_best_model", "loss")
    if path.startswith("output_config.") and ".checkpoint." not in path:
        # What is done with the result of a built-in trainer.
        return changed(LORA, "output_config.output_path", "s3://bucket") if path.endswith("_name") else LORA
    return document


def with_parts(document: dict[str, Any], path: str) -> dict[str, Any]:
    """The document with what a field lies in, where that may be absent."""
    if ".sampling." in path:
        return changed(document, "data_config.sources[0].sampling", {})
    if ".filters[0]." in path:
        return changed(document, "data_config.sources[0].filters", [{"column": "a", "op": "eq", "value": 1}])
    return document


def cases(table: dict[str, tuple[Any, list[Any], list[Any]]], column: int) -> list[Any]:
    return [
        pytest.param(path, value, id=f"{path}-{index}")
        for path, row in table.items()
        for index, value in enumerate(row[column])
    ]


def test_fields_table_names_every_field_of_a_submission() -> None:
    assert set(leaves(SubmitJobRequest)) == set(FIELDS)


@pytest.mark.parametrize("path", FIELDS)
def test_field_left_out_has_its_default(path: str) -> None:
    default = FIELDS[path][0]
    document = changed(CUSTOM, "output_config", {})
    if path in ("training_config.framework.type", "training_config.framework.custom_script_path"):
        document = changed(document, "training_config.framework", {})
    document = with_parts(document, path)
    if path.endswith("filters[0].value"):
        document = changed(document, "data_config.sources[0].filters", [{"column": "a", "op": "is_null"}])
    if default is not REQUIRED:
        assert at(redacted(parse_submit(document)), path) == default
        return
    place, _, last = path.rpartition(".")
    del (at(document, place) if place else document)[last]
    with pytest.raises(SpecError) as caught:
        parse_submit(document)
    assert [(problem.field, problem.message) for problem in caught.value.problems] == [(path, "required")]


@pytest.mark.parametrize(("path", "value"), cases(FIELDS, 1))
def test_field_takes_value_and_shows_it(path: str, value: Any) -> None:
    shown = at(redacted(parse_submit(changed(base_for(path), path, value))), path)
    if path.endswith("environment"):
        assert shown == dict.fromkeys(value, "***")
    elif path == "data_config.sources":
        assert [source["path"] for source in shown] == [source["path"] for source in value]
    elif path.endswith("sampling"):
        assert shown == {"weight": None, "ratio": None, "max_samples": None}
    else:
        assert shown == value


@pytest.mark.parametrize(("path", "value"), cases(FIELDS, 2))
def test_field_refuses_value_and_names_its_path(path: str, value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        parse_submit(changed(base_for(path), path, value))
    beside = {
        "output_config.push_to_hub": "output_config.hub_repo_id",
        "output_config.checkpoint.resume_from_best": "output_config.checkpoint.metric_for_best_model",
    }
    for problem in caught.value.problems:
        assert problem.field.startswith(beside.get(path, path) if value is True else path)
        assert "Input should" not in problem.message


@pytest.mark.parametrize("path", WORKLOAD_FIELDS)
@pytest.mark.parametrize("kind", ["command", "script", "service"])
def test_workload_field_left_out_has_its_default(kind: str, path: str) -> None:
    own = {"path": "/srv/a.py"} if kind == "script" else {"argv": ["true"]}
    request = parse_submit({"name": "n", "workload": {"kind": kind, **own}})
    assert redacted(request)["workload"][path] == WORKLOAD_FIELDS[path][0]


@pytest.mark.parametrize(("path", "value"), cases(WORKLOAD_FIELDS, 1))
def test_workload_field_takes_value_and_shows_it(path: str, value: Any) -> None:
    shown = redacted(parse_submit(changed(COMMAND, f"workload.{path}", value)))["workload"][path]
    assert shown == (dict.fromkeys(value, "***") if path == "environment" else value)


@pytest.mark.parametrize(("path", "value"), cases(WORKLOAD_FIELDS, 2))
def test_workload_field_refuses_value_and_names_its_path(path: str, value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        parse_submit(changed(COMMAND, f"workload.{path}", value))
    assert all(problem.field.startswith(f"workload.{path}") for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("path", "given", "stored"),
    [
        ("training_config.base_model.dtype", None, "auto"),
        ("output_config.export_format", None, "safetensors"),
        ("data_config.batch_size", None, 1),
        ("data_config.preprocess.padding", True, "longest"),
        ("data_config.preprocess.padding", False, "none"),
        ("name", "  trimmed ", "trimmed"),
        (
            "data_config.sources[0].filters",
            {"column": "a", "op": ">=", "value": 1},
            [{"column": "a", "op": "ge", "value": 1}],
        ),
    ],
)
def test_field_given_in_another_form_is_shown_in_its_own(path: str, given: Any, stored: Any) -> None:
    assert at(redacted(parse_submit(changed(CUSTOM, path, given))), path) == stored


@pytest.mark.parametrize(
    "path",
    [
        "labels",
        "training_config.hyperparameters",
        "training_config.base_model.model_kwargs",
        "training_config.framework.config",
        "training_config.framework.distributed.config",
        "data_config.preprocess.tokenizer_config",
    ],
)
def test_string_map_given_scalars_holds_their_text(path: str) -> None:
    given = {"int": 3, "float": 1e-05, "yes": True, "no": False, "text": "t"}
    shown = at(redacted(parse_submit(changed(CUSTOM, path, given))), path)
    assert shown == {"int": "3", "float": "1e-05", "yes": "true", "no": "false", "text": "t"}
