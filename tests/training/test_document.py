"""A trainer reads what the server writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.training.hyperparameters import read_hyperparameters
from trainmaster.server.core.training.types import BUILT_IN, TrainingType
from trainmaster.server.core.workloads.trainer import training_inputs
from trainmaster.training.document import Document, DocumentError, Prepared, TokenizationConfig, parsed

REQUEST: dict[str, Any] = {
    "name": "tune",
    "training_config": {
        "training_type": "LORA",
        "base_model": {"model_id": "org/model", "dtype": "bfloat16", "model_kwargs": {"use_cache": "false"}},
        "framework": {"type": "FSDP", "distributed": {"world_size": 2, "config": {"cpu_offload": "true"}}},
        "hyperparameters": {"lora_r": "4", "warmup_steps": "0.1", "lora_target_modules": "q_proj, v_proj"},
    },
    "data_config": {
        "sources": [{"path": "hf://org/rows"}],
        "batch_size": 3,
        "seed": 5,
        "preprocess": {"padding": True},
    },
    "resource_config": {"gpu_count": 0},
    "output_config": {"merge_lora": True, "checkpoint": {"save_steps": 7, "metric_for_best_model": "loss"}},
}


def read(tmp_path: Path, request: dict[str, Any]) -> Document:
    path = tmp_path / "training.json"
    path.write_text(training_inputs(parse_submit(request))["training.json"])
    return Document.read(path)


def test_document_of_the_server_is_read_whole(tmp_path: Path) -> None:
    document = read(tmp_path, REQUEST)
    request = parse_submit(REQUEST)
    assert request.training_config is not None
    assert document.name == "tune"
    assert document.training.base_model.model_kwargs == {"use_cache": "false"}
    assert document.training.framework == request.training_config.framework
    assert document.sharded
    assert document.output == request.output_config
    parameters = document.hyperparameters
    assert (parameters["lora_r"], parameters["warmup_steps"], parameters["learning_rate"]) == (4, 0.1, 2e-4)
    assert parameters["lora_target_modules"] == "q_proj,v_proj"
    assert (document.data.batch_size, document.data.seed, document.data.preprocess.padding) == (3, 5, "longest")
    assert not document.packing


def test_pretraining_packs_unless_it_is_told_not_to(tmp_path: Path) -> None:
    request = {**REQUEST, "training_config": {**REQUEST["training_config"], "training_type": "CONTINUED_PRETRAIN"}}
    request["training_config"] = {**request["training_config"], "hyperparameters": {}}
    request["output_config"] = {}
    assert read(tmp_path, request).packing
    request["data_config"] = {**REQUEST["data_config"], "preprocess": {"packing": False}}
    assert not read(tmp_path, request).packing


@pytest.mark.parametrize("training_type", sorted(BUILT_IN))
def test_hyperparameters_that_an_older_document_lacks_have_the_tables_defaults(
    training_type: str, tmp_path: Path
) -> None:
    document = {
        "name": "old",
        "training_config": {"training_type": training_type, "base_model": {"model_id": "org/model"}},
        "data_config": {"sources": [{"path": "rows.jsonl"}]},
        "output_config": {},
    }
    (tmp_path / "training.json").write_text(json.dumps(document))
    read = Document.read(tmp_path / "training.json")
    assert read.hyperparameters == read_hyperparameters(TrainingType(training_type), {})
    assert read.hyperparameters["warmup_steps"] == 0.03
    config = TokenizationConfig.from_document(document)
    assert config.completion_only_loss == (training_type != "FULL_FINETUNE")
    assert config.assistant_only_loss == (training_type not in ("FULL_FINETUNE", "DPO"))


def test_reading_documents_imports_nothing_heavy() -> None:
    heavy = {"fastapi", "sqlalchemy", "torch"}
    code = f"import sys, trainmaster.training.document; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    "text", ["", "{}", '{"name": "x", "training_config": {}, "data_config": {}, "output_config": {}}']
)
def test_what_is_no_document_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "training.json"
    path.write_text(text)
    with pytest.raises(DocumentError, match=r"training\.json is not a training document"):
        Document.read(path)


def test_prepared_without_a_path_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prepared.json"
    path.write_text(json.dumps({"model_path": "/m"}))
    with pytest.raises(DocumentError, match="does not say what was prepared"):
        Prepared.read(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("1e-3", 1e-3),
        (".5", 0.5),
        ("True", True),
        ("none", None),
        ('{"a": [1]}', {"a": [1]}),
        ("sdpa", "sdpa"),
        ("NaN", "NaN"),
        ("1e999", "1e999"),
    ],
)
def test_text_is_read_as_what_it_means(text: str, value: object) -> None:
    assert parsed(text) == value
