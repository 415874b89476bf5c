"""A training that was killed, paused or preempted ends with the very weights of one that was left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from local_servers import LocalServer
from real_server import wait_for
from tiny_trainings import EXAMPLES, PATIENCE_S, document, finish, output, statuses, submit, weights_digest

DATA = EXAMPLES / "data" / "questions.jsonl"
# The server's part is proven with scripts (contract/backends), the trainer's in tests/training, and that they work
# together with the pause in test_training_examples.
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def simulated_gpus() -> str:
    return "H100-80GB:2"


def lora(model: Path, **changes: Any) -> dict[str, Any]:
    return document(model, DATA, "LORA", resource_config={"gpu_count": 2}, **distributed(), **changes)


def distributed() -> dict[str, Any]:
    hyperparameters = {"max_steps": "60", "learning_rate": "1e-3", "logging_steps": "1", "lora_dropout": "0.1"}
    framework = {"distributed": {"world_size": 2, "backend": "gloo"}}
    return {"training_config": {"hyperparameters": hyperparameters, "framework": framework}}


@pytest.fixture(scope="module")
def undisturbed(shared_server: LocalServer, tiny_model: Path) -> str:
    """The digest of what a training leaves that nobody disturbs."""
    job_id = submit(shared_server, lora(tiny_model))
    finish(shared_server, job_id)
    return weights_digest(output(shared_server, job_id))


def reached(server: LocalServer, job_id: str, step: int) -> None:
    wait_for(
        lambda: (server.job(job_id)["progress"]["step"] or 0) >= step, f"step {step} of {job_id}", timeout_s=PATIENCE_S
    )


def test_training_that_is_killed_paused_and_preempted_ends_with_the_same_weights(
    server: LocalServer, tiny_model: Path, undisturbed: str
) -> None:
    job_id = submit(server, lora(tiny_model, scheduling_config={"max_retries": 1, "priority": 2, "preemptible": True}))
    reached(server, job_id, 7)
    server.kill_rank(job_id, 1)

    def again() -> bool:
        job = server.job(job_id)
        return len(job["attempts"]) == 2 and job["status"] == "TRAINING"

    wait_for(again, "its second attempt to train")
    server.control(job_id, "pause")
    paused = server.until(job_id, "PAUSED", timeout_s=PATIENCE_S)
    assert paused["progress"]["step"] < 60
    server.control(job_id, "resume")
    reached(server, job_id, paused["progress"]["step"] + 3)
    urgent = server.submit("sleep", "0.2", resource_config={"gpu_count": 2}, scheduling_config={"priority": 9})
    assert server.until(urgent, timeout_s=PATIENCE_S)["status"] == "COMPLETED"
    job = finish(server, job_id)
    reasons = [attempt["reason"] for attempt in job["attempts"]]
    assert reasons == ["KILLED_BY_SIGNAL", "PAUSED", "PREEMPTED", "SUCCEEDED"]
    assert all("from checkpoint" in event["message"] for event in server.events_of(job_id, "resumed"))
    assert "CHECKPOINTING" in statuses(server, job_id)
    assert weights_digest(output(server, job_id)) == undisturbed


def test_retry_with_other_resources_goes_on_from_the_parents_checkpoint(server: LocalServer, tiny_model: Path) -> None:
    job_id = submit(server, document(tiny_model, DATA, "SFT", resource_config={"gpu_count": 2}))
    reached(server, job_id, 6)
    server.control(job_id, "cancel")
    parent = server.until(job_id, "CANCELLED", timeout_s=PATIENCE_S)
    child = server.control(job_id, "retry", modify_resources=True, new_resource_config={"gpu_count": 1})["job_id"]
    job = finish(server, child)
    assert (job["parent_job_id"], job["progress"]["step"]) == (job_id, 24)
    assert job["attempts"][0]["resume_checkpoint_id"] == parent["latest_checkpoint_id"]


def test_training_goes_on_from_another_jobs_checkpoint_and_from_the_best(server: LocalServer, tiny_model: Path) -> None:
    # It gets better all the time, so that by this measure the first is the best.
    measure = {"metric_for_best_model": "eval_loss", "greater_is_better": True}
    best = {"checkpoint": {"save_steps": 6, "resume_from_best": True, **measure}}
    first = submit(
        server,
        document(
            tiny_model,
            DATA,
            "LORA",
            data_config={"validation_split": 0.2},
            output_config=best,
            training_config={
                "hyperparameters": {
                    "max_steps": "24",
                    "learning_rate": "1e-3",
                    "eval_strategy": "steps",
                    "eval_steps": "6",
                }
            },
        ),
    )
    job = finish(server, first)
    assert job["best_checkpoint_id"] != job["latest_checkpoint_id"]
    second = submit(
        server,
        document(
            tiny_model,
            DATA,
            "LORA",
            data_config={"validation_split": 0.2},
            output_config=best,
            training_config={
                "hyperparameters": {"max_steps": "26", "learning_rate": "1e-3"},
                "resume_from_checkpoint": job["latest_checkpoint_id"],
            },
        ),
    )
    ended = finish(server, second)
    assert ended["attempts"][0]["resume_checkpoint_id"] == job["best_checkpoint_id"]
    assert ended["progress"]["step"] == 26
