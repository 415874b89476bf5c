"""The result of a training: whole, loadable by others, and where the job wants it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from trainings import Job, Make, refusal

from trainmaster.jobs import objects
from trainmaster.protocol.reasons import StopCause

LORA = {"hyperparameters": {"learning_rate": 5e-2, "lora_r": 4}}


def trained(make_job: Make, training_type: str, **parts: Any) -> Job:
    job = make_job(training_type, **parts)
    job.train()
    return job


@pytest.mark.parametrize("precision", ["auto", "fp8"])
def test_merged_lora_says_what_base_and_adapter_say(make_job: Make, tiny: Path, check: Any, precision: str) -> None:
    parts = {"hyperparameters": {**LORA["hyperparameters"], "mixed_precision": precision}}
    adapter = trained(make_job, "LORA", output={"export_format": "adapter"}, **parts)
    merged = trained(make_job, "LORA", output={"merge_lora": True}, **parts)
    check("merged_like_adapter", tiny / "model", adapter.output / "model", merged.output / "model")
    assert not (merged.output / "model" / "adapter_config.json").exists()
    config = json.loads((adapter.output / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"
    check("checkpoint_holds", adapter.latest(), "lora_")


@pytest.mark.long
def test_merged_lora_of_a_sharded_training_says_what_base_and_adapter_say(
    make_job: Make, tiny: Path, check: Any
) -> None:
    parts = {"ranks": 2, "framework": {"type": "FSDP"}, "data": {"batch_size": 4}, **LORA}
    adapter = trained(make_job, "LORA", output={"export_format": "adapter"}, **parts)
    merged = trained(make_job, "LORA", output={"merge_lora": True}, **parts)
    check("merged_like_adapter", tiny / "model", adapter.output / "model", merged.output / "model")
    assert not (merged.output / "model" / "adapter_config.json").exists()


@pytest.mark.parametrize(
    "framework",
    [
        {"type": "FSDP"},
        {"type": "FSDP", "distributed": {"config": {"transformer_layer_cls_to_wrap": "Qwen3DecoderLayer"}}},
    ],
    ids=["engine", "trl"],
)
def test_exported_model_of_a_sharded_training_has_every_weight_once(
    make_job: Make, tiny: Path, check: Any, framework: dict[str, Any]
) -> None:
    parameters = {"max_steps": 2, "gradient_checkpointing": True}
    job = trained(make_job, "SFT", ranks=2, framework=framework, hyperparameters=parameters)
    assert ("the engine trains" in job.log()) is ("distributed" not in framework)
    check("generates", job.output / "model")
    check("same_names", job.output / "model", tiny / "model")


def test_exported_model_can_be_used_by_others(make_job: Make, check: Any) -> None:
    job = trained(make_job, "SFT")
    check("generates", job.output / "model")
    check("exported_like_checkpoint", job.output / "model", job.latest())


def test_best_checkpoint_is_exported_when_a_metric_says_which_it_is(make_job: Make, check: Any) -> None:
    # The greatest loss is that of the first checkpoint: nothing but the metric makes it the best.
    best = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    job = trained(make_job, "SFT", evaluate=True, checkpoint=best)
    check("exported_like_checkpoint", job.output / "model", job.checkpoints / "checkpoint-3")
    saved = [event for event in job.events() if event["type"] == "checkpoint"]
    assert [event["step"] for event in saved if "eval_loss" in event["metrics"]] == [3, 6, 9, 12]


def test_best_that_is_gone_does_not_cost_the_result(make_job: Make, check: Any) -> None:
    job = make_job(evaluate=True, checkpoint={"metric_for_best_model": "eval_loss", "greater_is_better": True})
    job.interrupt(StopCause.PAUSE, 8)
    shutil.rmtree(job.checkpoints / "checkpoint-3")
    job.train(resume_from=job.latest())
    check("exported_like_checkpoint", job.output / "model", job.latest())
    assert any("the best one cannot be read" in event.get("message", "") for event in job.events())


def test_result_is_copied_to_where_the_job_wants_it_and_replaces_an_earlier_one(make_job: Make) -> None:
    job = make_job("SFT", hyperparameters={"max_steps": 1})
    place = job.directory / "models"
    job.document["output_config"] |= {"output_path": f"file://{place}", "output_model_name": "mine"}
    job.train()
    (place / "mine" / "trainmaster.json").write_text(
        json.dumps({"files": ["old.safetensors", *os.listdir(place / "mine")]})
    )
    (place / "mine" / "old.safetensors").write_text("of an earlier training")
    job.train(resume_from=job.latest())
    ours, theirs = (sorted(path.name for path in each.iterdir()) for each in (job.output / "model", place / "mine"))
    assert ours == theirs
    assert "model.safetensors" in theirs
    assert [path.name for path in place.iterdir()] == ["mine"]


def test_result_never_replaces_what_no_training_left(make_job: Make) -> None:
    job = make_job("SFT", hyperparameters={"max_steps": 1})
    place = job.directory / "home"
    (place / "photos").mkdir(parents=True)
    (place / "photos" / "cat.jpg").write_text("the only one")
    job.document["output_config"]["output_path"] = str(place)
    assert "home holds photos/cat.jpg, which no training left there" in refusal(job)
    assert (place / "photos" / "cat.jpg").read_text() == "the only one"
    job.document["output_config"]["output_model_name"] = "mine"
    job.train()
    assert (place / "mine" / "model.safetensors").is_file()
    assert (place / "photos" / "cat.jpg").read_text() == "the only one"


def test_result_goes_to_an_object_store_and_replaces_an_earlier_one_alone(
    make_job: Make, s3_root: str, tmp_path: Path, check: Any
) -> None:
    job = make_job("SFT", hyperparameters={"max_steps": 1})
    job.document["output_config"]["output_path"] = s3_root
    store = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    job.train(**store)
    place = objects.open_place(s3_root)
    names = {meta["path"].rpartition("/")[2] for meta in objects.listing(place, place.key)}
    assert names == set(os.listdir(job.output / "model"))
    # An attempt that was killed while it sent the result.
    objects.delete(place, [place.below("config.json")])
    objects.put(place, place.below("trainmaster.json"), json.dumps({"files": ["old.bin", *names]}).encode())
    objects.put(place, place.below("old.bin"), b"of an earlier training")
    job.train(resume_from=job.latest(), **store)
    for meta in objects.listing(place, place.key):
        objects.receive(place, meta["path"], tmp_path / "fetched" / meta["path"].rpartition("/")[2])
    assert set(os.listdir(tmp_path / "fetched")) == names
    check("generates", tmp_path / "fetched")
    objects.put(place, place.below("mine.txt"), b"no training left this")
    assert "holds mine.txt, which no training left there" in refusal(job, resume_from=job.latest(), **store)


def test_object_store_that_refuses_is_told_before_the_training(make_job: Make, s3_root: str) -> None:
    job = make_job("SFT")
    job.document["output_config"]["output_path"] = s3_root
    store = {"AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"], "AWS_ACCESS_KEY_ID": "who"}
    message = refusal(job, reason="CREDENTIALS_REFUSED", AWS_SECRET_ACCESS_KEY="knows", **store)
    assert "AWS_ACCESS_KEY_ID" in message
    assert job.series("loss") == []


def test_export_after_a_kill_leaves_nothing_half(make_job: Make) -> None:
    job = make_job("SFT")
    half = job.output / f".export-{job.job_id}" / "new"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_text("half")
    job.train()
    assert [path.name for path in job.output.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "end",
    [
        *(pytest.param(each, marks=pytest.mark.long) for each in ({"max_steps": 5}, {"num_train_epochs": 1.0})),
        {"num_train_epochs": 1.5},
    ],
)
def test_training_that_was_killed_while_exporting_only_exports(make_job: Make, end: dict[str, float]) -> None:
    job = trained(make_job, "SFT", hyperparameters={"lr_scheduler_type": "constant", **end})
    first = job.result()
    job.train(resume_from=job.latest())
    assert job.result() == first
    assert job.series("loss") == []
