"""Lists and single jobs as JSON, which is written by hand: it is what the schema says."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from api_world import COMMAND, SERVICE, Api, World

from trainmaster.schema.jobs import MOST_BLOCKERS, ControlledJob, JobList, JobResource, PendingResource
from trainmaster.server.core.job import JobProgress
from trainmaster.server.core.resources import Share
from trainmaster.server.core.states import JobStatus, PendingCode
from trainmaster.server.http.envelope import Ok, encoded
from trainmaster.server.http.job_json import pending_resource
from trainmaster.server.http.routes.jobs import plain_query
from trainmaster.server.scheduling.explain import Blocker, Explanation
from trainmaster.server.scheduling.shortage import BestNode

TRAINING: dict[str, Any] = {
    "name": "tune",
    "training_config": {
        "training_type": "LORA",
        "base_model": {"model_id": "m"},
        "framework": {"type": "CUSTOM", "custom_script_path": "/srv/train.py"},
        "environment": {"PASSWORD": "hunter2"},
    },
    "data_config": {"sources": [{"path": "file:///data"}], "batch_size": 4},
    "resource_config": {"gpu_count": 0},
    "output_config": {"checkpoint": {"metric_for_best_model": "loss"}},
}


def as_the_schema_says(shape: Any, data: Any) -> None:
    """Every field is there, in the schema's order, and with its type."""
    written = Ok[shape](data=data).data
    assert data == written
    assert json.dumps(data) == json.dumps(written)


def of_every_kind(api: Api, world: World) -> dict[str, str]:
    """A job in every situation that is shown in a way of its own."""
    ids = {
        "queued": api.submit(labels={"team": "vision"}, handle=f"h-{time.time_ns()}"),
        "impossible": api.submit(resource_config={"gpu_count": 64, "gpu_type": "none"}),
        "running": api.submit(resource_config={"gpu_count": 4, "node_count": 2}),
        "failed": api.submit(name="ümlaut 😀"),
        "completed": api.submit(),
        "training": api.call("POST", "/v1/jobs", 201, json=TRAINING)["job_id"],
        "service": api.submit(**SERVICE),
        "cancelled": api.submit(),
    }
    own = ids["running"]  # nodes of the test's own, as others hold theirs
    world.start(own, Share(node_id=f"{own}-a", gpus=(0, 1)), Share(node_id=f"{own}-b", gpus=(2, 3)))
    progress = JobProgress(
        step=10, total_steps=100, epoch=0.5, percent=10.0, eta_s=1e-7, metrics={"loss": 0.25, "worse": float("nan")}
    )
    world.report(ids["running"], progress)
    world.save(ids["running"], f"c-{time.time_ns()}", 10, loss=0.25)
    world.start(ids["failed"])
    evidence = {"last_lines": ["Traceback", "half \ud800"], "frame": "train.py:1"}
    world.end(ids["failed"], "EXITED_NONZERO", "exit 3", exit_code=3, rank=0, evidence=evidence)
    for name in ("completed", "training"):
        world.start(ids[name])
        world.end(ids[name])
    world.start(ids["service"])
    world.see(ids["service"], endpoint="127.0.0.1:9")
    api.call("POST", f"/v1/jobs/{ids['cancelled']}/cancel", json={})
    return ids


def test_reason_of_a_wait_follows_the_schema() -> None:
    best = BestNode(node_id="n", gpus_free=1, cpu_cores_free=2, ram_mb_free=3, storage_mb_free=4, slots_free=5)
    held = Blocker(job_id="job-1", name="mine", queued=False, gpus=2, ends_in_s=61.23456)
    waits = Blocker(job_id=None, name=None, queued=True, gpus=0, ends_in_s=None)
    explanation = Explanation(
        code=PendingCode.ROOM,
        message="needs 2 GPUs",
        needs="2 GPUs",
        best_node=best,
        blockers=[held] * MOST_BLOCKERS + [waits],
        would_start_if="job mine ended",
        runtime_s=60,
    )
    for told in (explanation, replace(explanation, best_node=None, blockers=[waits], runtime_s=None)):
        as_the_schema_says(PendingResource, json.loads(encoded(pending_resource(told))))


def test_jobs_follow_the_schema(api: Api, world: World) -> None:
    ids = of_every_kind(api, world)
    for _ in range(2):  # the second time, from what is kept
        for job_id in ids.values():
            as_the_schema_says(JobResource, api.show(job_id))
        for query in ("", "?page_size=3", "?order_by=name&status=TRAINING", "?labels.team=vision", "?kind=command"):
            as_the_schema_says(JobList, api.call("GET", f"/v1/jobs{query}"))
    as_the_schema_says(ControlledJob, api.call("POST", f"/v1/jobs/{ids['failed']}/retry", 201, json={}))
    as_the_schema_says(JobResource, api.call("PATCH", f"/v1/jobs/{ids['queued']}", json={"priority": 7}))


def test_listed_job_says_the_same_as_the_job_itself(api: Api, world: World) -> None:
    of_every_kind(api, world)
    changing = {"runtime_seconds", "gpu_seconds"}
    for listed in api.call("GET", "/v1/jobs")["jobs"]:
        shown = api.show(listed["job_id"])
        assert {name: shown[name] for name in listed if name not in changing} == {
            name: value for name, value in listed.items() if name not in changing
        }


def test_list_shows_every_change_at_once(api: Api, world: World) -> None:
    job_id = api.submit()

    def listed() -> Any:
        (job,) = api.call("GET", "/v1/jobs")["jobs"]
        return job

    assert (listed()["status"], listed()["labels"]) == ("QUEUED", {})
    api.call("PATCH", f"/v1/jobs/{job_id}", json={"labels": {"a": "b"}})
    assert listed()["labels"] == {"a": "b"}
    world.start(job_id, Share(node_id=f"{job_id}-a", gpus=(0, 1)))
    first = listed()
    assert (first["status"], first["placement"]["nodes"]) == ("TRAINING", [f"{job_id}-a"])
    while (later := listed())["runtime_seconds"] == first["runtime_seconds"]:
        assert later["version"] == first["version"]
    assert later["gpu_seconds"] == pytest.approx(2 * later["runtime_seconds"], abs=0.002)
    world.end(job_id)
    assert listed()["status"] == "COMPLETED"


def test_running_attempt_counts_in_the_job_itself_too(api: Api, world: World) -> None:
    job_id = api.submit()
    world.start(job_id)
    before = api.show(job_id)["runtime_seconds"]
    while api.show(job_id)["runtime_seconds"] == before:
        pass


@pytest.mark.parametrize(
    "query",
    [
        b"page_size=0",
        b"page_size=101",
        b"page_size=%D9%A1",
        b"page_size=5&page_size=6",
        b"page_size",
        b"page_size=+5",
        b"order_by=handle",
        b"status=GONE",
        b"status=queued",
        b"queue=q",
        b"labels.a=b",
        b"nonsense=1",
        b"page_token=%00",
        b"page_token=\xff",
        b"page_token=" + b"a" * 2000,
    ],
)
def test_query_that_is_not_plain_is_left_to_the_route(query: bytes) -> None:
    assert plain_query(query, ()) is None


def test_plain_query_means_what_the_route_takes_it_for() -> None:
    default = plain_query(b"", ("command",))
    assert default is not None
    assert (default.page_size, default.order_by, default.kinds) == (20, "-created_at", ("command",))
    query = plain_query(b"page_size=100&order_by=name&status=QUEUED&status=TRAINING&page_token=a%2Bb", ())
    assert query is not None
    assert query.statuses == (JobStatus.QUEUED, JobStatus.TRAINING)
    assert (query.page_size, query.order_by, query.page_token) == (100, "name", "a+b")


@pytest.mark.parametrize("path", ["/v1/jobs/{}", "/v1/modules/scaimind/jobs/{}"])
def test_job_is_found_by_every_address_and_refuses_unknown_parameters(api: Api, path: str) -> None:
    job_id = api.submit(**COMMAND)
    assert api.call("GET", path.format(job_id))["job_id"] == job_id
    assert api.call("GET", path.format(job_id) + "?nonsense=1", 422)["details"][0]["field"] == "nonsense"
    assert api.call("GET", path.format("x" * 257), 422)["details"][0]["field"] == "job_id"
    assert api.call("GET", path.format("none"), 404)["code"] == "JOB_NOT_FOUND"
