"""The result of a training: whole, loadable by others, and where the job wants it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from trainings import Job, Make, Zygote

from trainmaster.protocol.reasons import StopCause

LORA = {"hyperparameters": {"learning_rate": 5e-2, "lora_r": 4}}


@pytest.fixture
def check(zygote: Zygote, tmp_path: Path) -> Any:
    def run(name: str, *arguments: Path) -> None:
        log = tmp_path / "check.log"
        pid = zygote.start({}, log, call=f"checks:{name}", arguments=[str(each) for each in arguments])
        assert zygote.wait(pid) == 0, log.read_text()

    return run


def trained(make_job: Make, training_type: str, **parts: Any) -> Job:
    job = make_job(training_type, **parts)
    job.train()
    return job


def test_merged_lora_says_what_base_and_adapter_say(make_job: Make, tiny: Path, check: Any) -> None:
    adapter = trained(make_job, "LORA", output={"export_format": "adapter"}, **LORA)
    merged = trained(make_job, "LORA", output={"merge_lora": True}, **LORA)
    check("merged_like_adapter", tiny / "model", adapter.output / "model", merged.output / "model")
    assert not (merged.output / "model" / "adapter_config.json").exists()
    config = json.loads((adapter.output / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"
    check("checkpoint_holds", adapter.latest(), "lora_")


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


def test_result_is_copied_to_where_the_job_wants_it(make_job: Make) -> None:
    job = make_job("SFT")
    place = job.directory / "models"
    job.document["output_config"] |= {"output_path": f"file://{place}", "output_model_name": "mine"}
    (place / "mine").mkdir(parents=True)
    (place / "mine" / "old.txt").write_text("of an earlier job")
    job.train()
    ours, theirs = (sorted(path.name for path in each.iterdir()) for each in (job.output / "model", place / "mine"))
    assert ours == theirs
    assert "model.safetensors" in theirs
    assert [path.name for path in place.iterdir()] == ["mine"]


def test_export_after_a_kill_leaves_nothing_half(make_job: Make) -> None:
    job = make_job("SFT")
    half = job.output / f".export-{job.job_id}" / "new"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_text("half")
    job.train()
    assert [path.name for path in job.output.iterdir()] == ["model"]


def test_training_that_was_killed_while_exporting_only_exports(make_job: Make) -> None:
    job = trained(make_job, "SFT")
    first = job.result()
    job.train(resume_from=job.latest())
    assert job.result() == first
    assert job.series("loss") == []
