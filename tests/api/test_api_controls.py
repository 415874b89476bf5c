"""Controls over HTTP, and commands that are sent twice."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from api_world import COMMAND, SERVICE, Api, World


def post(api: Api, job_id: str, action: str, expect: int = 200, **options: Any) -> Any:
    return api.call("POST", f"/v1/jobs/{job_id}/{action}", expect, **options)


def test_waiting_job_is_cancelled_at_once(api: Api) -> None:
    job = post(api, api.submit(), "cancel", json={"reason": "not needed"})
    assert (job["status"], job["status_reason"], job["status_message"]) == ("CANCELLED", "CANCELLED", "not needed")


def test_running_job_is_cancelled_when_it_has_stopped(api: Api, world: World) -> None:
    job_id = api.submit()
    world.start(job_id)
    job = post(api, job_id, "cancel")
    assert (job["status"], job["cancel_requested"]) == ("TRAINING", True)
    world.end(job_id, "CANCELLED")
    assert api.show(job_id)["status"] == "CANCELLED"


def test_cancel_of_an_ended_job_says_what_would_be_possible(api: Api) -> None:
    job_id = api.submit()
    post(api, job_id, "cancel")
    error = post(api, job_id, "cancel", 409)
    assert error["code"] == "INVALID_STATE_TRANSITION"
    assert error["details"]["status"] == "CANCELLED"
    assert error["details"]["action"] == "cancel"
    assert "QUEUED" in error["details"]["allowed_from"]


def test_pause_and_resume_name_the_checkpoint(api: Api, world: World) -> None:
    job_id = api.submit()
    world.start(job_id)
    world.save(job_id, "p1", 1)
    world.save(job_id, "p2", 2)
    paused = post(api, job_id, "pause")
    assert (paused["status"], paused["desired"], paused["checkpoint_id"]) == ("TRAINING", "pause", "p2")
    world.end(job_id, "PAUSED")
    assert api.show(job_id)["status"] == "PAUSED"
    resumed = post(api, job_id, "resume", json={"checkpoint_id": "p1"})
    assert (resumed["status"], resumed["checkpoint_id"]) == ("QUEUED", "p1")


def test_pause_of_a_job_that_cannot_save_is_refused_unless_told_otherwise(api: Api, world: World) -> None:
    job_id = api.submit()
    world.start(job_id)
    assert "save_checkpoint" in post(api, job_id, "pause", 409)["message"]
    paused = post(api, job_id, "pause", json={"save_checkpoint": False})
    assert (paused["desired"], paused["checkpoint_id"]) == ("pause", None)


def test_resume_from_an_unknown_checkpoint_is_not_found(api: Api, world: World) -> None:
    job_id = api.submit()
    world.start(job_id)
    post(api, job_id, "pause", json={"save_checkpoint": False})
    world.end(job_id, "PAUSED")
    assert post(api, job_id, "resume", 404, json={"checkpoint_id": "nothing"})["code"] == "NOT_FOUND"
    assert post(api, job_id, "resume")["checkpoint_id"] is None


def test_ended_service_can_be_resumed(api: Api, world: World) -> None:
    job_id = api.submit(**SERVICE)
    world.start(job_id)
    world.end(job_id, "EXITED_NONZERO")
    assert post(api, job_id, "resume")["status"] == "QUEUED"


def test_retry_makes_a_child(api: Api, world: World) -> None:
    job_id = api.submit()
    world.start(job_id)
    world.save(job_id, "r1", 1)
    world.end(job_id, "EXITED_NONZERO")
    child = post(api, job_id, "retry", 201)
    assert child["parent_job_id"] == child["root_job_id"] == job_id
    assert child["checkpoint_id"] == "r1"
    assert child["status"] == "QUEUED"
    resources = {"gpu_count": 0, "cpu_cores": 2}
    child = post(api, job_id, "retry", 201, json={"modify_resources": True, "new_resource_config": resources})
    assert child["resource_config"]["cpu_cores"] == 2
    assert child["handle"] is None
    assert post(api, job_id, "retry", 201, json={"handle": "again"})["handle"] == "again"
    assert post(api, job_id, "retry", 409, json={"handle": "again"})["code"] == "HANDLE_TAKEN"


def test_retry_of_a_job_whose_queue_was_removed_waits_in_the_default_one(api: Api) -> None:
    api.call("PUT", "/v1/queues/sweeps", json={"weight": 1})
    job_id = api.submit(scheduling_config={"queue": "sweeps"})
    post(api, job_id, "cancel")
    api.call("DELETE", "/v1/queues/sweeps")
    child = post(api, job_id, "retry", 201)
    assert (child["queue"], child["scheduling_config"]["queue"]) == ("default", "default")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"modify_resources": True}, "new_resource_config"),
        ({"new_resource_config": {}}, "new_resource_config"),
        ({"modify_resources": True, "new_resource_config": {"gpu_cont": 1}}, "new_resource_config.gpu_cont"),
        ({"checkpoint": "x"}, "checkpoint"),
        ({"handle": "not a handle"}, "handle"),
    ],
)
def test_bad_retry_is_refused(api: Api, body: Any, field: str) -> None:
    job_id = api.submit()
    post(api, job_id, "cancel")
    assert post(api, job_id, "retry", 422, json=body)["details"][0]["field"] == field


@pytest.mark.parametrize(("action", "near"), [("cancel", "reason"), ("pause", "save_checkpoint")])
def test_unknown_field_of_a_control_is_named(api: Api, action: str, near: str) -> None:
    (detail,) = post(api, api.submit(), action, 422, json={near[:-1]: "x"})["details"]
    assert near in detail["message"]


def test_submission_with_one_key_makes_one_job(api: Api) -> None:
    headers = {"Idempotency-Key": "once"}

    def submit(_: int) -> tuple[str, str | None]:
        response = api.http.post("/v1/jobs", json=COMMAND, headers=headers)
        assert response.status_code == 201
        return response.json()["data"]["job_id"], response.headers.get("Idempotent-Replayed")

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(submit, range(100)))
    assert len({job_id for job_id, _ in answers}) == 1
    assert sorted(str(replayed) for _, replayed in answers) == ["None"] + ["true"] * 99
    assert api.call("GET", "/v1/jobs")["total_count"] == 1


def test_key_of_a_different_request_is_refused(api: Api) -> None:
    headers = {"Idempotency-Key": "twice"}
    api.call("POST", "/v1/jobs", 201, json=COMMAND, headers=headers)
    error = api.call("POST", "/v1/jobs", 422, json={**COMMAND, "name": "m"}, headers=headers)
    assert error["code"] == "IDEMPOTENCY_KEY_REUSED"


def test_key_is_the_same_at_both_addresses(api: Api) -> None:
    headers = {"Idempotency-Key": "alias"}
    first = api.call("POST", "/v1/jobs", 201, json=COMMAND, headers=headers)
    again = api.call("POST", "/v1/modules/scaimind/jobs", 201, json=COMMAND, headers=headers)
    assert first["job_id"] == again["job_id"]


def test_repeated_control_is_answered_like_the_first(api: Api, world: World) -> None:
    job_id = api.submit()
    post(api, job_id, "cancel", headers={"Idempotency-Key": "c"})
    response = api.http.post(f"/v1/jobs/{job_id}/cancel", headers={"Idempotency-Key": "c"})
    assert response.status_code == 200
    assert response.headers["Idempotent-Replayed"] == "true"
    children = {post(api, job_id, "retry", 201, headers={"Idempotency-Key": "r"})["job_id"] for _ in range(3)}
    assert len(children) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "é"])
def test_bad_idempotency_key_is_refused(api: Api, key: str) -> None:
    headers = {"Idempotency-Key": key.encode()}
    error = api.call("POST", "/v1/jobs", 422, json=COMMAND, headers=headers)
    assert error["details"][0]["field"] == "Idempotency-Key"
