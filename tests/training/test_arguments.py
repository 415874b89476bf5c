"""What a job says of batches and ranks is what TRL's trainer is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_documents import LORA, changed
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.workloads.trainer import training_inputs
from trainmaster.training.document import Document, Prepared
from trainmaster.training.trl_trainer import trl_options

Arguments = Callable[..., dict[str, Any]]


@pytest.fixture
def arguments(tmp_path: Path) -> Arguments:
    """The arguments of a plain LORA training in which some fields are changed."""

    def made(changes: dict[str, Any], *, world_size: int = 1) -> dict[str, Any]:
        document = LORA
        for path, value in changes.items():
            document = changed(document, path, value)
        (tmp_path / "training.json").write_text(training_inputs(parse_submit(document))["training.json"])
        prepared = Prepared(
            model_path="/m",
            tokenizer_path="/m",
            train_path="/t",
            eval_path=None,
            train_rows=1,
            train_tokens=1,
            max_seq_length=48,
        )
        training = Document.read(tmp_path / "training.json")
        return trl_options(training, prepared, scratch=tmp_path, world_size=world_size)

    return made


@pytest.mark.parametrize("pinned", [True, False])
def test_memory_is_pinned_as_the_job_says(arguments: Arguments, pinned: bool) -> None:
    assert arguments({"data_config.pin_memory": pinned})["dataloader_pin_memory"] is pinned
    assert arguments({})["dataloader_pin_memory"] is torch.cuda.is_available()


def test_samples_are_padded_as_the_job_says(arguments: Arguments) -> None:
    batch = {"data_config.batch_size": 2}
    assert "pad_to_multiple_of" not in arguments(batch)
    assert arguments({**batch, "data_config.preprocess.padding": "max_length"})["pad_to_multiple_of"] == 48
    assert not arguments({**batch, "data_config.preprocess.padding": "longest"})["padding_free"]
    assert arguments({**batch, "data_config.preprocess.padding": "none"})["padding_free"]


def test_backend_of_ranks_is_the_one_that_was_asked_for(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    field = "training_config.framework.distributed.backend"
    plain = {"training_config.hyperparameters": {"mixed_precision": "no"}}
    assert arguments({field: "nccl"}).get("ddp_backend") is None  # one rank talks to nobody
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for backend in ("nccl", "gloo"):
        assert arguments({**plain, field: backend}, world_size=2)["ddp_backend"] == backend
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert arguments({field: "nccl"}, world_size=2)["ddp_backend"] == "gloo"  # NCCL needs a GPU


def test_options_of_the_strategy_reach_it(arguments: Arguments) -> None:
    option = {"training_config.framework.distributed.config": {"ddp_bucket_cap_mb": "10"}}
    assert arguments(option, world_size=2)["ddp_bucket_cap_mb"] == 10
    assert "ddp_bucket_cap_mb" not in arguments({}, world_size=2)


@pytest.mark.parametrize(("given", "recomputes"), [("auto", True), ("true", True), ("false", False)])
def test_activations_are_recomputed_unless_the_job_says_no(arguments: Arguments, given: str, recomputes: bool) -> None:
    option = {"training_config.hyperparameters": {"gradient_checkpointing": given, "mixed_precision": "no"}}
    assert arguments(option)["gradient_checkpointing"] is recomputes
    sharded = {**option, "training_config.framework": {"type": "FSDP", "distributed": {"world_size": 2}}}
    assert arguments(sharded, world_size=2)["fsdp_config"]["activation_checkpointing"] is recomputes
