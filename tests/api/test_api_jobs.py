"""Jobs over HTTP: submitted, listed, shown, edited, deleted."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest
from api_world import COMMAND, SERVICE, Api, World

from trainmaster.server.core.job import JobProgress
from trainmaster.server.core.resources import Gpu, Node, Share
from trainmaster.server.storage import ARTIFACTS
from trainmaster.server.store import nodes
from trainmaster.server.store.scope import Scope

TRAINING: dict[str, Any] = {
    "name": "tune",
    "training_config": {
        "training_type": "LORA",
        "base_model": {"model_id": "m"},
        "framework": {"type": "CUSTOM", "custom_script_path": "/srv/train.py", "distributed": {"world_size": 2}},
        "environment": {"PASSWORD": "hunter2"},
        "max_retries": 3,
    },
    "data_config": {"sources": [{"path": "file:///data"}], "batch_size": 4, "gradient_accumulation_steps": 8},
    "resource_config": {"gpu_count": 0},
    "output_config": {"checkpoint": {"metric_for_best_model": "loss"}},
}

FIELDS = {
    *("job_id", "name", "labels", "parent_job_id", "root_job_id", "created_at", "created_by", "handle", "kind"),
    *("training_config", "data_config", "resource_config", "output_config", "scheduling_config", "workload"),
    *("status", "status_reason", "error_message", "error_type", "error", "desired", "cancel_requested", "stalled"),
    *("queue", "queue_position", "priority", "estimated_wait_seconds", "pending_reason", "pending"),
    *("attempt", "max_retries", "attempts", "placement", "progress", "metrics", "output", "links", "endpoint"),
    *("latest_checkpoint_id", "best_checkpoint_id", "checkpoints", "effective_batch_size"),
    *("queued_at", "started_at", "finished_at", "paused_at", "runtime_seconds", "gpu_seconds", "version"),
}


def test_submitted_job_is_accepted_and_shown(api: Api) -> None:
    accepted = api.call("POST", "/v1/jobs", 201, json={**COMMAND, "labels": {"team": "vision"}, "handle": "first"})
    assert accepted["status"] == "QUEUED"
    assert accepted["estimated_wait_seconds"] is None
    assert accepted["message"]
    job = api.show(accepted["job_id"])
    assert set(job) >= FIELDS
    assert job["name"] == "n"
    assert job["labels"] == {"team": "vision"}
    assert job["created_by"] == "tester"
    assert job["root_job_id"] == job["job_id"]
    assert job["workload"]["argv"] == ["sh", "-c", "echo hi"]
    assert job["pending_reason"]
    assert datetime.fromisoformat(job["created_at"]).utcoffset() is not None
    assert api.show("first") == job


def test_every_route_is_found_at_both_addresses(api: Api) -> None:
    job_id = api.call("POST", "/v1/modules/scaimind/jobs", 201, json=COMMAND)["job_id"]
    assert api.call("GET", f"/v1/modules/scaimind/jobs/{job_id}")["job_id"] == api.show(job_id)["job_id"]


def test_content_type_does_not_matter(api: Api) -> None:
    body = b'{"name": "n", "workload": {"kind": "command", "argv": ["true"]}}'
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    assert api.call("POST", "/v1/jobs", 201, content=body, headers=headers)["job_id"]


def test_bad_submission_names_every_field_and_the_nearest_name(api: Api) -> None:
    document = {**COMMAND, "resource_config": {"gpu_cont": 1}, "labels": {"type": "x"}}
    error = api.call("POST", "/v1/jobs", 422, json=document)
    assert error["code"] == "VALIDATION_ERROR"
    details = {detail["field"]: detail["message"] for detail in error["details"]}
    assert "gpu_count" in details["resource_config.gpu_cont"]
    assert "labels.type" in details


def test_unknown_queue_is_refused(api: Api) -> None:
    error = api.call("POST", "/v1/jobs", 422, json={**COMMAND, "scheduling_config": {"queue": "nope"}})
    assert error["details"][0]["field"] == "scheduling_config.queue"


def test_handle_can_be_taken_once(api: Api) -> None:
    api.submit(handle="mine")
    assert api.call("POST", "/v1/jobs", 409, json={**COMMAND, "handle": "mine"})["code"] == "HANDLE_TAKEN"


def test_secrets_never_come_back(api: Api) -> None:
    job_id = api.call("POST", "/v1/jobs", 201, json=TRAINING)["job_id"]
    response = api.http.get(f"/v1/jobs/{job_id}")
    assert "hunter2" not in response.text
    assert response.json()["data"]["training_config"]["environment"] == {"PASSWORD": "***"}
    assert "hunter2" not in api.http.get("/v1/jobs").text


def test_effective_batch_size_is_shown(api: Api) -> None:
    job = api.show(api.call("POST", "/v1/jobs", 201, json=TRAINING)["job_id"])
    assert job["effective_batch_size"] == 4 * 8 * 2
    assert job["max_retries"] == 3
    assert job["data_config"]["seed"] is not None


def test_queued_job_says_why_it_waits(api: Api, world: World) -> None:
    job_id = api.submit(resource_config={"gpu_count": 8})
    world.queue(job_id)
    job = api.show(job_id)
    assert job["status"] == "QUEUED"
    assert job["queue_position"] >= 1
    assert "local" in job["pending_reason"]


def test_running_job_is_shown_whole(api: Api, world: World) -> None:
    job_id = api.call("POST", "/v1/jobs", 201, json=TRAINING)["job_id"]
    world.start(job_id, Share(node_id="n1", gpus=(2, 3)))
    metrics = {"loss": 1.5, "odd": float("nan")}
    world.report(job_id, JobProgress(step=5, total_steps=10, epoch=0.5, percent=50.0, metrics=metrics))
    world.save(job_id, "c1", 3, loss=2.0)
    world.save(job_id, "c2", 5, loss=3.0)
    job = api.show(job_id)
    assert job["status"] == "TRAINING"
    assert job["attempt"] == 1
    assert job["placement"] == {
        "backend": "local",
        "nodes": ["n1"],
        "gpus": [{"node_id": "n1", "index": 2}, {"node_id": "n1", "index": 3}],
    }
    assert job["progress"] == {"step": 5, "total_steps": 10, "epoch": 0.5, "percent": 50.0, "eta_seconds": None}
    assert job["metrics"] == {"loss": 1.5, "odd": None}
    assert (job["latest_checkpoint_id"], job["best_checkpoint_id"]) == ("c2", "c1")
    first, second = job["checkpoints"]
    assert (first["checkpoint_id"], first["step"], first["is_best"], first["status"]) == ("c1", 3, True, "COMMITTED")
    assert (second["is_latest"], second["metrics"], second["size_bytes"]) == (True, {"loss": 3.0}, 10)
    assert first["uri"].endswith(f"{job_id}/checkpoints/c1")
    assert job["started_at"]
    assert job["runtime_seconds"] >= 0
    (attempt,) = job["attempts"]
    assert attempt["number"] == 1
    assert "token" not in attempt
    assert job["can_save"] is True


def test_failed_job_says_whose_fault_and_what_to_do(api: Api, world: World) -> None:
    job_id = api.submit()
    world.start(job_id)
    world.end(
        job_id,
        "EXITED_NONZERO",
        "exit code 3",
        exit_code=3,
        rank=0,
        step="main",
        evidence={"last_lines": ["Traceback", "ValueError: \udcff"], "frame": "File x.py, line 1, in f: ValueError"},
    )
    job = api.show(job_id)
    assert (job["status"], job["error_type"], job["error_message"]) == ("FAILED", "EXITED_NONZERO", "exit code 3")
    error = job["error"]
    assert (error["exit_code"], error["fault"], error["rank"]) == (3, "user", 0)
    assert error["last_lines"] == ["Traceback", "ValueError: ?"]
    assert error["frame"].startswith("File x.py")
    assert error["advice"]
    assert job["attempts"][0]["error"] == error
    assert job["placement"] is None
    assert job["finished_at"]


def test_completed_job_names_its_output_if_it_left_one(api: Api, world: World) -> None:
    job_id = api.submit()
    assert api.show(job_id)["output"]["model_uri"] is None
    world.start(job_id)
    world.end(job_id)
    job = api.show(job_id)
    assert job["status"] == "COMPLETED"
    assert job["error"] is None
    assert job["output"]["model_uri"] is None
    output = world.roots.path(ARTIFACTS, f"{job_id}/output")
    output.mkdir(parents=True, exist_ok=True)
    assert api.show(job_id)["output"]["model_uri"] is None
    (output / "model.bin").write_text("x")
    assert api.show(job_id)["output"]["model_uri"] == f"artifacts:{job_id}/output"


def test_service_shows_its_endpoint(api: Api, world: World) -> None:
    job_id = api.submit(**SERVICE)
    world.start(job_id)
    world.see(job_id, endpoint="127.0.0.1:1234")
    assert api.show(job_id)["endpoint"] == {"address": "127.0.0.1:1234", "path": f"/v1/jobs/{job_id}/proxy/"}


def test_unknown_job_is_not_found(api: Api) -> None:
    assert api.call("GET", "/v1/jobs/job-nothing", 404)["code"] == "JOB_NOT_FOUND"


def test_list_pages_through_everything_once(api: Api) -> None:
    made = [api.submit(name=f"job {n}") for n in range(7)]
    seen: list[str] = []
    token = None
    while True:
        page = api.call("GET", "/v1/jobs", params={"page_size": 3, **({"page_token": token} if token else {})})
        assert page["total_count"] == 7
        seen += [job["job_id"] for job in page["jobs"]]
        token = page["next_page_token"]
        if token is None:
            break
    assert seen == made[::-1]
    by_name = api.call("GET", "/v1/jobs?order_by=name")["jobs"]
    assert [job["name"] for job in by_name] == [f"job {n}" for n in range(7)]


def test_list_filters(api: Api, world: World) -> None:
    a = api.submit(labels={"team": "a", "a.b/c": "1"})
    world.start(a)
    b = api.submit(labels={"team": "b", "a.b/c": "1"})
    c = api.submit(**{**SERVICE, "labels": {"team": "a"}})

    def found(query: str) -> set[str]:
        return {job["job_id"] for job in api.call("GET", f"/v1/jobs?{query}")["jobs"]}

    assert found("labels.team=a") == {a, c}
    assert found("labels.team=a&labels.team=b") == {a, b, c}
    assert found("labels.team=a&labels.a.b/c=1") == {a}
    assert found("labels.team=") == set()
    assert found("status=TRAINING") == {a}
    assert found("status=QUEUED&status=TRAINING") == {a, b, c}
    assert found("kind=service") == {c}
    assert found("kind=service&kind=command") == {a, b, c}
    assert found("queue=default") == {a, b, c}
    assert found("queue=other") == set()


def test_listed_job_has_no_configs(api: Api) -> None:
    api.submit()
    (job,) = api.call("GET", "/v1/jobs")["jobs"]
    assert job["status"] == "QUEUED"
    assert "workload" not in job
    assert "attempts" not in job


def test_edit_changes_what_is_given(api: Api) -> None:
    job_id = api.submit(labels={"a": "1"})
    job = api.call("PATCH", f"/v1/jobs/{job_id}", json={"priority": 9})
    assert (job["priority"], job["labels"]) == (9, {"a": "1"})
    job = api.call("PATCH", f"/v1/jobs/{job_id}", json={"labels": {"b": "2"}})
    assert (job["priority"], job["labels"]) == (9, {"b": "2"})
    assert job["scheduling_config"]["priority"] == 9


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ({"prioriti": 1}, "prioriti", "priority"),
        ({"priority": 11}, "priority", "at most 10"),
        ({"queue": "nope"}, "queue", "default"),
        ({"labels": {"system/x": "1"}}, "labels.system/x", "reserved"),
        ([], "request", "object"),
    ],
)
def test_bad_edit_is_refused(api: Api, body: Any, field: str, says: str) -> None:
    (detail,) = api.call("PATCH", f"/v1/jobs/{api.submit()}", 422, json=body)["details"]
    assert detail["field"] == field
    assert says in detail["message"]


def test_edit_of_an_ended_job_is_refused(api: Api, world: World) -> None:
    job_id = api.submit()
    world.start(job_id)
    world.end(job_id)
    error = api.call("PATCH", f"/v1/jobs/{job_id}", 409, json={"priority": 1})
    assert error["details"]["action"] == "edit"


def test_deleted_job_is_gone(api: Api) -> None:
    job_id = api.submit(handle="gone")
    assert api.call("DELETE", f"/v1/jobs/{job_id}")["desired"] == "delete"
    assert api.call("GET", f"/v1/jobs/{job_id}", 404)["code"] == "JOB_NOT_FOUND"
    assert api.call("GET", "/v1/jobs")["jobs"] == []
    api.submit(handle="gone")


def test_deleted_job_can_be_purged_afterwards_by_its_id_or_its_handle(api: Api, world: World) -> None:
    job_id = api.submit(handle="later")
    api.call("DELETE", f"/v1/jobs/{job_id}")
    assert api.call("DELETE", f"/v1/jobs/{job_id}", 404)["code"] == "JOB_NOT_FOUND"
    assert api.call("DELETE", "/v1/jobs/later", 404)["code"] == "JOB_NOT_FOUND"
    other = {"Authorization": f"Bearer {world.key('somebody else')}"}
    for name in (job_id, "later"):
        assert api.call("DELETE", f"/v1/jobs/{name}?purge=true", 404, headers=other)
    assert world.job(job_id).purge is False
    for name in ("later", job_id):
        job = api.call("DELETE", f"/v1/jobs/{name}?purge=true")
        assert (job["job_id"], job["desired"], job["status"]) == (job_id, "delete", "CANCELLED")
    assert world.job(job_id).purge is True
    assert api.call("GET", f"/v1/jobs/{job_id}", 404)


def test_deletion_of_a_running_job_stops_it_first(api: Api, world: World) -> None:
    job_id = api.submit()
    world.start(job_id)
    job = api.call("DELETE", f"/v1/jobs/{job_id}?purge=true")
    assert (job["status"], job["desired"]) == ("TRAINING", "delete")
    assert world.job(job_id).purge is True
    world.end(job_id, "DELETED")
    assert api.call("GET", f"/v1/jobs/{job_id}", 404)


def test_nodes_show_what_is_free_and_who_holds_the_rest(api: Api, world: World) -> None:
    node_id = f"node-{api.account_id}"
    node = Node(
        node_id=node_id,
        backend="local",
        hostname="h",
        cpu_cores=8,
        ram_mb=1000,
        storage_mb=100,
        gpus=tuple(Gpu(index=i, device=str(i), type="H100", memory_mb=80_000) for i in range(3)),
        labels=("zone=a",),
        last_seen_at=time.time(),
    )
    world.database.write_now(lambda connection: nodes.put(connection, Scope.everything(), [node]))
    mine = api.submit()
    world.start(mine, Share(node_id=node_id, gpus=(0,), cpu_cores=2))
    theirs = api.call("POST", "/v1/jobs", 201, json=COMMAND, headers={"Authorization": f"Bearer {world.key('them')}"})
    world.start(theirs["job_id"], Share(node_id=node_id, gpus=(1,), cpu_cores=3))
    shown = api.call("GET", f"/v1/nodes/{node_id}")
    assert [(gpu["free"], gpu["job_id"]) for gpu in shown["gpus"]] == [(False, mine), (False, None), (True, None)]
    assert shown["cpu_cores"] == {"total": 8, "free": 3}
    assert shown["jobs"] == [mine]
    assert (shown["state"], shown["labels"]) == ("READY", ["zone=a"])
    assert shown in api.call("GET", "/v1/nodes")["nodes"]
    assert api.call("GET", "/v1/nodes/nowhere", 404)["code"] == "NOT_FOUND"
