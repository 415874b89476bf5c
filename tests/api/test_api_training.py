"""Trainings over HTTP: what is refused, with which status, and what later attempts and children go on from."""

from __future__ import annotations

from typing import Any

import pytest
from api_world import COMMAND, Api, World

LORA: dict[str, Any] = {
    "name": "tune",
    "training_config": {
        "training_type": "LORA",
        "base_model": {"model_id": "org/model"},
        "hyperparameters": {"learning_rate": 1e-3},
    },
    "data_config": {"sources": [{"path": "hf://org/data"}]},
    "resource_config": {"gpu_count": 0},
}
BY_LOSS = {"checkpoint": {"metric_for_best_model": "loss", "resume_from_best": True}}


def tuned(**training: Any) -> dict[str, Any]:
    return {**LORA, "training_config": {**LORA["training_config"], **training}}


def post(api: Api, job_id: str, verb: str, expect: int = 200, **body: Any) -> Any:
    return api.call("POST", f"/v1/jobs/{job_id}/{verb}", expect, json=body)


def saved(world: World, job_id: str) -> None:
    """A job that runs and saved twice, the better one first."""
    world.start(job_id)
    world.save(job_id, f"{job_id}-1", 1, loss=0.1)
    world.save(job_id, f"{job_id}-2", 2, loss=0.9)


def test_training_without_a_workload_waits_for_admission_and_shows_what_it_is(api: Api) -> None:
    accepted = api.call("POST", "/v1/jobs", 201, json=LORA)
    assert accepted["status"] == "PENDING"
    job = api.show(accepted["job_id"])
    assert (job["kind"], job["workload"], job["can_save"]) == ("trainer", None, True)
    assert job["training_config"]["hyperparameters"] == {"learning_rate": "0.001"}
    assert isinstance(job["data_config"]["seed"], int)


@pytest.mark.parametrize(
    ("training", "field", "says"),
    [
        ({"hyperparameters": {"learning_rat": 1}}, "training_config.hyperparameters.learning_rat", "'learning_rate'"),
        ({"hyperparameters": {"max_steps": "x"}}, "training_config.hyperparameters.max_steps", "whole number"),
        ({"framework": {"type": "FSDP"}}, "training_config.framework.distributed.world_size", "two ranks"),
    ],
)
def test_training_that_the_tables_refuse_is_400_and_names_the_field(
    api: Api, training: dict[str, Any], field: str, says: str
) -> None:
    error = api.call("POST", "/v1/jobs", 400, json=tuned(**training))
    assert error["code"] == "INVALID_ARGUMENT"
    assert [detail["field"] for detail in error["details"]] == [field]
    assert says in error["message"]


@pytest.mark.parametrize("training_type", ["QLORA", "RLHF"])
def test_training_type_of_a_later_version_is_400(api: Api, training_type: str) -> None:
    error = api.call("POST", "/v1/jobs", 400, json=tuned(training_type=training_type))
    assert "not available in this version" in error["message"]


def named(name: str, field: str = "model_id") -> dict[str, Any]:
    return tuned(base_model={"model_id": "org/model", field: name})


@pytest.mark.parametrize("field", ["model_id", "tokenizer_id"])
def test_model_that_another_job_left_is_named_by_that_jobs_id(api: Api, world: World, field: str) -> None:
    first = api.submit(handle="first")
    name = f"artifacts:{first}/output/model"
    job = api.show(api.call("POST", "/v1/jobs", 201, json=named(name, field))["job_id"])
    assert job["training_config"]["base_model"][field] == name
    assert f"artifacts:{first}/output/model" in refused_name(api, named("artifacts:first/output/model", field), field)
    other = {"Authorization": f"Bearer {world.key('not-its-job')}"}
    assert "there is no job" in refused_name(api, named(name, field), field, headers=other)
    api.call("DELETE", f"/v1/jobs/{first}")
    assert "there is no job" in refused_name(api, named(name, field), field)


def test_retry_of_a_job_whose_model_is_gone_says_so(api: Api) -> None:
    first = api.submit()
    job_id = api.call("POST", "/v1/jobs", 201, json=named(f"artifacts:{first}/output/model"))["job_id"]
    post(api, job_id, "cancel")
    api.call("DELETE", f"/v1/jobs/{first}")
    assert f"there is no job {first}" in post(api, job_id, "retry", 422)["message"]


@pytest.mark.parametrize(
    "rest", ["", "JOB", "JOB/", "JOB/../other/output", "JOB/output//model", "/output", "JOB/./output"]
)
def test_what_is_no_directory_of_a_job_is_refused(api: Api, rest: str) -> None:
    document = named(f"artifacts:{rest.replace('JOB', api.submit())}")
    assert "write artifacts:JOB/output/model" in refused_name(api, document, "model_id")


def refused_name(api: Api, document: dict[str, Any], field: str, **options: Any) -> str:
    """What is said of a base model's field, alike by a submission and by a question before it."""
    said = [api.call("POST", f"/v1/jobs{more}", 422, json=document, **options)["details"] for more in ("", "/validate")]
    assert said[0] == said[1]
    assert [detail["field"] for detail in said[0]] == [f"training_config.base_model.{field}"]
    return str(said[0][0]["message"])


def test_remote_code_is_403_unless_the_server_allows_it(api: Api) -> None:
    document = tuned(base_model={"model_id": "org/model", "trust_remote_code": True})
    error = api.call("POST", "/v1/jobs", 403, json=document)
    assert error["code"] == "FORBIDDEN"
    assert "allow_trust_remote_code" in error["message"]


def test_resume_and_later_attempts_go_on_from_the_best_where_that_is_wanted(api: Api, world: World) -> None:
    job_id = api.submit(output_config=BY_LOSS)
    saved(world, job_id)
    post(api, job_id, "pause", save_checkpoint=False)
    world.end(job_id, "PAUSED")
    assert post(api, job_id, "resume")["checkpoint_id"] == f"{job_id}-1"
    world.place(job_id)
    assert world.job(job_id).live.resume_checkpoint_id == f"{job_id}-1"


def test_retry_goes_on_from_the_best_where_that_is_wanted(api: Api, world: World) -> None:
    job_id = api.submit(output_config=BY_LOSS)
    saved(world, job_id)
    world.end(job_id, "EXITED_NONZERO")
    assert post(api, job_id, "retry", 201)["checkpoint_id"] == f"{job_id}-1"
    assert post(api, job_id, "retry", 201, checkpoint_id=f"{job_id}-2")["checkpoint_id"] == f"{job_id}-2"


def test_job_that_resumes_from_anothers_checkpoint_takes_it_or_that_jobs_best(api: Api, world: World) -> None:
    other = api.submit()
    saved(world, other)
    named = tuned(resume_from_checkpoint=f"{other}-2")
    plain = api.call("POST", "/v1/jobs", 201, json=named)["job_id"]
    assert world.job(plain).resume_checkpoint_id == f"{other}-2"
    best = api.call("POST", "/v1/jobs", 201, json={**named, "output_config": BY_LOSS})["job_id"]
    assert world.job(best).resume_checkpoint_id == f"{other}-1"


def test_job_that_resumes_from_a_checkpoint_without_the_metric_takes_the_one_it_names(api: Api, world: World) -> None:
    other = api.submit()
    saved(world, other)
    config = {"checkpoint": {"metric_for_best_model": "entropy", "resume_from_best": True}}
    document = {**tuned(resume_from_checkpoint=f"{other}-2"), "output_config": config}
    job_id = api.call("POST", "/v1/jobs", 201, json=document)["job_id"]
    assert world.job(job_id).resume_checkpoint_id == f"{other}-2"


def test_retry_on_other_gpus_has_as_many_ranks_as_those(api: Api, world: World) -> None:
    framework = {"distributed": {"world_size": 4}}
    document = {**tuned(framework=framework), "resource_config": {"gpu_count": 4}}
    job_id = api.call("POST", "/v1/jobs", 201, json=document)["job_id"]
    world.start(job_id)
    world.end(job_id, "EXITED_NONZERO")
    child = post(api, job_id, "retry", 201, modify_resources=True, new_resource_config={"gpu_count": 2})
    assert child["resource_config"]["gpu_count"] == 2
    assert child["training_config"]["framework"]["distributed"]["world_size"] is None
    assert child["effective_batch_size"] == 2


def test_retry_on_resources_that_its_framework_cannot_use_is_400(api: Api, world: World) -> None:
    document = {**tuned(framework={"type": "FSDP"}), "resource_config": {"gpu_count": 2}}
    job_id = api.call("POST", "/v1/jobs", 201, json=document)["job_id"]
    world.start(job_id)
    world.end(job_id, "EXITED_NONZERO")
    error = post(api, job_id, "retry", 400, modify_resources=True, new_resource_config={"gpu_count": 1})
    assert "at least two ranks" in error["message"]


def test_checkpoint_on_an_object_store_is_shown_by_its_uri(api: Api, world: World) -> None:
    job_id = api.submit(**COMMAND)
    world.start(job_id)
    record = {"type": "checkpoint", "checkpoint_id": "far", "step": 1, "root": "uri", "path": "s3://bucket/run/1"}
    world.see(job_id, record)
    [checkpoint] = api.show(job_id)["checkpoints"]
    assert checkpoint["uri"] == "s3://bucket/run/1"
    assert api.call("GET", f"/v1/jobs/{job_id}/artifacts")["artifacts"] == []
