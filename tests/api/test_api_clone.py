"""Cloning a job over HTTP: the same request, or a changed one, with the secrets of the old job."""

from __future__ import annotations

from typing import Any

from api_world import COMMAND, VAULT, Api, World

from trainmaster.client.types import request_of

ENVIRONMENT = {"PASSWORD": "hunter2", "PLAIN": "x"}


def with_secrets(api: Api) -> str:
    return api.submit(workload={**COMMAND["workload"], "environment": ENVIRONMENT}, handle="mine", labels={"team": "a"})


def secrets_of(world: World, job_id: str) -> dict[str, str]:
    with world.database.read() as connection:
        return VAULT.open(connection, world.job(job_id))


def clone(api: Api, job_id: str, expect: int = 201, **options: Any) -> Any:
    return api.call("POST", f"/v1/jobs/{job_id}/clone", expect, **options)


def test_empty_body_makes_the_same_job_again(api: Api, world: World) -> None:
    job_id = with_secrets(api)
    world.start(job_id)
    world.end(job_id)

    cloned = clone(api, "mine")

    new, old = api.show(cloned["job_id"]), api.show(job_id)
    assert new["handle"] is None
    assert new["status"] != "COMPLETED"
    assert {name: new[name] for name in request_of(new)} == {name: old[name] for name in request_of(old)}
    assert secrets_of(world, cloned["job_id"]) == {f"env.{name}": value for name, value in ENVIRONMENT.items()}


def test_changed_document_keeps_the_secrets_that_it_does_not_change(api: Api, world: World) -> None:
    job_id = with_secrets(api)
    document = request_of(api.show(job_id))
    document["workload"]["environment"]["PLAIN"] = "y"

    cloned = clone(api, job_id, json=document)

    assert secrets_of(world, cloned["job_id"]) == {"env.PASSWORD": "hunter2", "env.PLAIN": "y"}


def test_hidden_value_that_the_old_job_does_not_have_is_refused(api: Api) -> None:
    job_id = with_secrets(api)
    document = request_of(api.show(job_id))
    document["workload"]["environment"]["UNKNOWN"] = "***"
    document["name"] = "***"

    error = clone(api, job_id, 422, json=document)

    assert {problem["field"] for problem in error["details"]} == {"workload.environment.UNKNOWN", "name"}


def test_job_of_another_account_cannot_be_cloned(api: Api) -> None:
    job_id = with_secrets(api)
    stranger = {"Authorization": f"Bearer {api.world.key('another')}"}

    assert clone(api, job_id, 404, headers=stranger)["code"] == "JOB_NOT_FOUND"
    document = request_of(api.show(job_id))
    assert clone(api, job_id, 404, json=document, headers=stranger)["code"] == "JOB_NOT_FOUND"


def test_clone_with_an_idempotency_key_is_made_once(api: Api) -> None:
    job_id = with_secrets(api)
    key = {"Idempotency-Key": "once"}

    assert clone(api, job_id, headers=key)["job_id"] == clone(api, job_id, headers=key)["job_id"]


def test_jobs_are_listed_by_name(api: Api) -> None:
    job_id = api.submit(name="a name")
    api.submit(name="a name that is longer")

    listed = api.call("GET", "/v1/jobs", params={"name": "a name"})

    assert [job["job_id"] for job in listed["jobs"]] == [job_id]
    assert listed["total_count"] == 1


def test_key_shows_itself(api: Api) -> None:
    key = api.call("GET", "/v1/keys/current")

    assert key["account_id"] == api.account_id
    assert key["revoked_at"] is None
    assert "key" not in key


def test_function_of_a_clone_is_checked_as_that_of_a_submission(api: Api) -> None:
    function = {"kind": "function", "source": "def train():\n    pass\n", "name": "train"}
    job_id = api.submit(workload=function)
    document = request_of(api.show(job_id))
    document["workload"]["source"] = "def train(:\n"

    error = clone(api, job_id, 422, json=document)

    assert [problem["field"] for problem in error["details"]] == ["workload.source"]
