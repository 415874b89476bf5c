"""Checkpoints of trainers: what they refuse, what they fall back to, and what they do not wait for."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_model import TRL
from trainings import Job, Make, Zygote, refusal

from trainmaster.protocol import environment
from trainmaster.protocol.reasons import StopCause


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept") / "checkpoints"


@pytest.fixture
def paused(make_job: Make, kept: Path) -> Job:
    """A job that was paused at step 4; it trained for the first who asked, and others have copies."""
    job = make_job()
    if kept.exists():
        shutil.copytree(kept, job.checkpoints)
    else:
        job.interrupt(StopCause.PAUSE, 4)
        shutil.copytree(job.checkpoints, kept)
    return job


def test_resume_without_the_file_of_the_optimizer_refuses(paused: Job) -> None:
    job = paused
    arrays = next(job.latest().glob("arrays-*.safetensors"))
    arrays.unlink()
    message = refusal(job, resume_from=job.latest())
    assert arrays.name in message
    assert "resume from another checkpoint" in message


@pytest.mark.parametrize("part", ["optimizer", "scheduler", "model"])
def test_resume_from_a_checkpoint_that_lacks_a_part_refuses(paused: Job, part: str) -> None:
    job = paused
    document = json.loads((job.latest() / "tree.json").read_text())
    document["tree"]["dict"] = [entry for entry in document["tree"]["dict"] if entry[0] != part]
    rewrite(job.latest(), "tree.json", json.dumps(document))
    assert f"lacks {part}" in refusal(job, resume_from=job.latest())


def test_resume_without_the_random_numbers_of_a_rank_refuses(paused: Job) -> None:
    job = paused
    manifest = json.loads((job.latest() / "manifest.json").read_text())
    manifest["files"] = [file for file in manifest["files"] if not file["path"].startswith("rng-")]
    (job.latest() / "manifest.json").write_text(json.dumps(manifest))
    assert "random-number generators" in refusal(job, resume_from=job.latest())


def test_resume_from_a_checkpoint_that_is_gone_refuses(make_job: Make) -> None:
    job = make_job()
    message = refusal(job, resume_from=job.checkpoints / "checkpoint-3")
    assert "checkpoint-3: there is no checkpoint any more. Bring it back" in message


def test_resume_with_another_adapter_refuses(make_job: Make) -> None:
    job = make_job("LORA", hyperparameters={"lora_r": 4})
    job.interrupt(StopCause.PAUSE, 4)
    job.document["training_config"]["hyperparameters"]["lora_r"] = 8
    assert "shape" in refusal(job, resume_from=job.latest())


def test_resume_beside_another_base_model_refuses_where_it_matters(make_job: Make) -> None:
    for training_type in ("LORA", "SFT"):
        job = make_job(training_type, hyperparameters={"max_steps": 5})
        job.prepared |= {"model_key": "one", "rows_key": "some"}
        job.interrupt(StopCause.PAUSE, 3)
        job.prepared["model_key"] = "another"
        if training_type == "LORA":
            assert "the base model is not the one that it was trained beside" in refusal(job, resume_from=job.latest())
        else:
            job.train(resume_from=job.latest())


def test_resume_with_other_rows_is_noted(make_job: Make) -> None:
    job = make_job(hyperparameters={"max_steps": 5})
    job.prepared["rows_key"] = "some"
    job.interrupt(StopCause.PAUSE, 3)
    job.prepared["rows_key"] = "others"
    job.train(resume_from=job.latest())
    notes = [event["message"] for event in job.events() if event["type"] == "note"]
    assert any("the rows are not those that the checkpoint was trained on" in note for note in notes)


def test_corrupt_checkpoint_is_passed_over_for_the_one_before(make_job: Make) -> None:
    whole, job = make_job(), make_job()
    whole.train()
    job.interrupt(StopCause.PAUSE, 7)
    assert {path.name for path in job.committed()} >= {"checkpoint-3", "checkpoint-6"}
    corrupt = job.latest()
    path = next(corrupt.glob("arrays-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    job.train(resume_from=corrupt)
    notes = [event["message"] for event in job.events() if event["type"] == "note"]
    assert any(f"{corrupt.name} is corrupt" in note for note in notes)
    assert job.result() == whole.result()


def test_stop_without_a_save_leaves_at_once(make_job: Make) -> None:
    job = make_job(checkpoint={"save_steps": 100})
    job.interrupt(StopCause.CANCEL, 4, save=False)
    assert job.committed() == []


def test_save_on_request_does_not_stop_the_training(make_job: Make) -> None:
    job = make_job(checkpoint={"save_steps": 100})
    job.start(hook={"step": 4, "control": {"seq": 1, "save": True, "grace_s": 30.0}, "during": "step"})
    assert job.finish() == [0], job.log()
    steps = sorted(event["step"] for event in job.events() if event["type"] == "checkpoint")
    assert len(steps) == 2
    assert 4 <= steps[0] <= 6
    assert steps[1] == 12


@pytest.mark.parametrize("loop", [{}, TRL], ids=["engine", "trl"])
@pytest.mark.parametrize("during", [pytest.param("step", marks=pytest.mark.long), "evaluation"])
def test_pause_before_or_while_evaluating_is_heeded_and_the_evaluation_made_up_for(
    make_job: Make, during: str, loop: dict[str, Any]
) -> None:
    parts = {
        **loop,
        "evaluate": True,
        "hyperparameters": {"eval_strategy": "steps", "eval_steps": 4},
        "data": {"batch_size": 4},
        "checkpoint": {"save_steps": 100, "metric_for_best_model": "eval_loss"},
    }
    whole, job = make_job(**parts), make_job(**parts)
    whole.train()
    evaluated = whole.series("eval_loss")
    job.interrupt(StopCause.PAUSE, 4, during=during)
    assert job.series("eval_loss") == []
    assert job.latest().name == "checkpoint-4"
    job.train(resume_from=job.latest())
    assert job.series("eval_loss") == evaluated
    assert job.result() == whole.result()


@pytest.mark.parametrize(
    "parts",
    [
        {"checkpoint": {"save_steps": 3}},
        pytest.param(
            {
                "checkpoint": {"save_strategy": "epoch"},
                "data": {"batch_size": 16},
                "hyperparameters": {"num_train_epochs": 2},
            },
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.parametrize("loop", [{}, TRL], ids=["engine", "trl"])
def test_pause_where_a_checkpoint_is_due_does_not_keep_it_from_being_the_best(
    make_job: Make, parts: dict, loop: dict[str, Any]
) -> None:
    # The greatest loss is that of the first checkpoint.
    best = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    parts = {**parts, **loop, "evaluate": True, "checkpoint": {**parts["checkpoint"], **best}}
    whole, job = make_job(**parts), make_job(**parts)
    whole.train()
    job.interrupt(StopCause.PAUSE, 3)
    job.train(resume_from=job.latest())
    assert job.result() == whole.result()


def test_fewer_ranks_go_on_at_the_same_place_with_a_note(make_job: Make) -> None:
    job = make_job(ranks=2, data={"batch_size": 4}, hyperparameters={"num_train_epochs": 2.0})
    job.interrupt(StopCause.PREEMPT, 3)
    manifest = json.loads((job.latest() / "manifest.json").read_text())
    child = make_job(data={"batch_size": 4}, hyperparameters={"num_train_epochs": 2.0})
    child.train(resume_from=job.latest())
    notes = [event["message"] for event in child.events() if event["type"] == "note"]
    assert any("saved by 2 ranks, and 1 resume" in note for note in notes)
    first = child.metrics()[0]
    assert (first["step"], first["total_steps"]) == (2 * manifest["step"], 24)
    assert child.metrics()[-1]["step"] == 24
    assert child.series("learning_rate")[-1] < child.series("learning_rate")[0]


def test_another_job_goes_on_from_a_checkpoint_with_options_of_its_own(make_job: Make, paused: Job) -> None:
    step = int(paused.latest().name.split("-")[1])
    options = {"learning_rate": 0.5, "num_train_epochs": 2.0, "lr_scheduler_type": "constant"}
    second = make_job(hyperparameters=options)
    second.train(resume_from=paused.latest())
    assert second.series("learning_rate") == [0.5] * (24 - step)
    assert second.metrics()[-1]["total_steps"] == 24


def test_second_training_from_the_same_checkpoint_replaces_nothing(make_job: Make) -> None:
    job = make_job()
    job.train()
    before = {path: (path / "manifest.json").read_bytes() for path in job.committed()}
    job.train(resume_from=job.checkpoints / "checkpoint-6")
    assert {path: (path / "manifest.json").read_bytes() for path in before} == before
    assert (job.checkpoints / "checkpoint-9-attempt-2").is_dir()


def test_every_node_saves_when_that_is_asked_for(make_job: Make) -> None:
    job = make_job(checkpoint={"save_on_each_node": True, "save_total_limit": 2})
    job.train(**{environment.NODE: "1"})
    copies = sorted(path.name for path in (job.checkpoints / "node-1").iterdir() if not path.name.startswith("."))
    assert copies == ["checkpoint-12", "checkpoint-9"]
    told = [event["path"] for event in job.events() if event["type"] == "checkpoint"]
    assert not any("node-1" in path for path in told)
    job.train(resume_from=job.checkpoints / "node-1" / "checkpoint-9")


def test_last_checkpoint_has_the_last_evaluation_also_in_the_middle_of_an_epoch(make_job: Make) -> None:
    job = make_job(evaluate=True, hyperparameters={"max_steps": 5})
    job.train()
    (last,) = [event for event in job.events() if event["type"] == "checkpoint" and event["step"] == 5]
    assert [last["metrics"]["eval_loss"]] == job.series("eval_loss")


def test_metric_that_nobody_measures_is_told_once(make_job: Make) -> None:
    job = make_job(checkpoint={"metric_for_best_model": "acuracy"}, hyperparameters={"max_steps": 6})
    job.train()
    (note,) = [event["message"] for event in job.events() if event["type"] == "note" and "best" in event["message"]]
    assert note.startswith("no checkpoint is the best: acuracy (metric_for_best_model) is none of its metrics; it has ")
    assert "mean_token_accuracy" in note


def test_checkpoint_that_cannot_be_written_ends_the_attempt_for_another_try(make_job: Make) -> None:
    job = make_job()
    no_directory = job.directory / "file"
    no_directory.write_text("")
    job.start(**{environment.CHECKPOINT_DIR: str(no_directory / "checkpoints")})
    assert job.finish() == [1]
    assert [event["reason"] for event in job.events() if event["type"] == "failed"] == ["STORAGE_UNAVAILABLE"]
    assert "Traceback" not in job.log()


def test_attempt_that_no_longer_owns_its_job_commits_nothing(make_job: Make) -> None:
    job = make_job()
    owner, token = job.directory / "owner.json", job.directory / "token"
    owner.write_text(json.dumps({"token": "another"}))
    token.write_text("mine")
    job.start(**{environment.OWNER_FILE: str(owner), environment.TOKEN_FILE: str(token)})
    assert job.finish() == [1]
    assert job.committed() == []
    assert "no longer owns its job" in job.log()
    assert "Traceback" not in job.log()


def test_tracker_sees_one_run_whatever_the_number_of_attempts(make_job: Make, zygote: Zygote) -> None:
    job = make_job(hyperparameters={"tracker": "trackio", "tracker_project": "mine"})
    job.interrupt(StopCause.PAUSE, 4)
    job.train(resume_from=job.latest())
    log, where = job.directory / "check.log", str(job.output / "tracker")
    pid = zygote.start({"TRACKIO_DIR": where}, log, call="checks:tracked_once", arguments=["mine", 12])
    assert zygote.wait(pid) == 0, log.read_text()


def rewrite(checkpoint: Path, name: str, text: str) -> None:
    """Change a file as if it had been committed like that."""
    (checkpoint / name).write_text(text)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for file in manifest["files"]:
        if file["path"] == name:
            file |= {"size": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
