"""Pins, deleted checkpoints, usage, collecting, and logs that are gone or have a gap."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from typing import Any

import httpx
from api_world import Api, Served, World, wait_for
from sqlalchemy import Connection

from patience import PATIENCE_S
from trainmaster.client import Client
from trainmaster.protocol.run_directory import Gap, log_stream
from trainmaster.server.coordinator.retention import Collector
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.resources import Share
from trainmaster.server.core.retention import RetentionPolicy
from trainmaster.server.storage import ARTIFACTS, RUNS
from trainmaster.server.store import checkpoints, jobs
from trainmaster.server.store.scope import Scope

BEST = {"output_config": {"checkpoint": {"metric_for_best_model": "loss"}}}


def saved(api: Api, **fields: Any) -> str:
    """A job that runs and has saved three times."""
    job_id = api.submit(**BEST, **fields)
    api.world.start(job_id)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        api.world.save(job_id, f"{job_id}-{step}", step, loss=loss)
        api.world.roots.path(ARTIFACTS, f"{job_id}/checkpoints/{job_id}-{step}").mkdir(parents=True)
    return job_id


def test_checkpoint_is_pinned_and_then_cannot_be_deleted(api: Api) -> None:
    job = saved(api)
    path = f"/v1/jobs/{job}/checkpoints/{job}-1"
    after = api.call("POST", f"{path}/pin")
    assert [each["pinned"] for each in after["checkpoints"]] == [True, False, False]
    api.call("POST", f"{path}/pin")  # once more is as good as once
    assert "unpin it first" in api.call("DELETE", path, 409)["message"]
    assert [each["pinned"] for each in api.show(job)["checkpoints"]] == [True, False, False]
    api.call("POST", f"{path}/unpin")
    api.call("DELETE", path)
    events = api.call("GET", f"/v1/jobs/{job}/events?limit=1000")["events"]
    told = [event["type"] for event in events if event["type"].startswith("checkpoint_")]
    assert told == ["checkpoint_pinned", "checkpoint_unpinned", "checkpoint_deleted"]


def test_job_is_shown_with_the_newest_of_very_many_checkpoints(api: Api) -> None:
    job = flooded(api, checkpoints.MOST_SHOWN)
    for shown in (api.show(job), api.call("GET", f"/v1/jobs/{job}/metrics")):
        assert len(shown["checkpoints"]) == checkpoints.MOST_SHOWN
        assert [each["checkpoint_id"] for each in shown["checkpoints"][-2:]] == [f"{job}-0", f"{job}-1"]


def flooded(api: Api, older: int) -> str:
    """A job with two checkpoints, and some that are older."""
    job = api.submit(output_config={"checkpoint": {"save_total_limit": 1000}})
    api.world.start(job)
    for step in range(2):
        api.world.save(job, f"{job}-{step}", step)
    scope = Scope.everything()

    def copy(connection: Connection) -> None:
        stored = jobs.get(connection, scope, job)
        (first, *_) = checkpoints.of_job(connection, scope, job)
        more = [
            replace(first, checkpoint_id=f"{job}-old-{number}", created_at=first.created_at - 1 - number)
            for number in range(older)
        ]
        checkpoints.register(connection, scope, stored, more)

    api.world.database.write_now(copy)
    return job


def test_very_many_checkpoints_come_in_pages_and_the_client_follows_them(api: Api) -> None:
    job = flooded(api, 2500)
    path = f"/v1/jobs/{job}/checkpoints"
    first = api.call("GET", path)
    assert (len(first["checkpoints"]), first["total_count"]) == (100, 2502)
    assert first["latest_checkpoint_id"] == f"{job}-1"
    found: list[Any] = []
    sizes = []
    page: dict[str, Any] = {"next_page_token": ""}
    while page["next_page_token"] is not None:
        page = api.call("GET", path, params={"page_size": 1000, "page_token": page["next_page_token"]})
        sizes.append(len(page["checkpoints"]))
        found += page["checkpoints"]
    assert sizes == [1000, 1000, 502]
    assert [each["checkpoint_id"] for each in found[-2:]] == [f"{job}-0", f"{job}-1"]
    assert len({each["checkpoint_id"] for each in found}) == 2502
    one = api.call("GET", path, params={"checkpoint_id": f"{job}-old-7"})
    assert ([each["checkpoint_id"] for each in one["checkpoints"]], one["total_count"]) == ([f"{job}-old-7"], 1)
    assert api.call("GET", path, params={"checkpoint_id": "nobodys"})["checkpoints"] == []
    for refused in ("page_size=0", "page_size=1001", "page_token=nonsense"):
        api.call("GET", f"{path}?{refused}", 422)
    with Client(str(api.http.base_url), api.key) as client:
        assert client.results.checkpoints(job) == {**page, "checkpoints": found}
        assert client.results.checkpoint_id(job, "latest") == f"{job}-1"
        (named,) = client.results.checkpoints(job, checkpoint_id=f"{job}-old-7")["checkpoints"]
        assert named == one["checkpoints"][0]
        assert client.results.has_checkpoints(job)
    pinned = api.call("POST", f"{path}/{job}-old-2499/pin")
    assert (len(pinned["checkpoints"]), pinned["checkpoints"][0]["pinned"]) == (100, True)


def test_deleting_moves_latest_and_best_and_hides_the_files(api: Api) -> None:
    job = saved(api)
    assert api.show(job)["best_checkpoint_id"] == f"{job}-2"
    after = api.call("DELETE", f"/v1/jobs/{job}/checkpoints/{job}-2")
    assert after["best_checkpoint_id"] == f"{job}-3"
    after = api.call("DELETE", f"/v1/jobs/{job}/checkpoints/{job}-3")
    assert (after["latest_checkpoint_id"], after["best_checkpoint_id"]) == (f"{job}-1", f"{job}-1")
    assert [each["checkpoint_id"] for each in api.show(job)["checkpoints"]] == [f"{job}-1"]
    assert "the last one" in api.call("DELETE", f"/v1/jobs/{job}/checkpoints/{job}-1", 409)["message"]
    api.call("DELETE", f"/v1/jobs/{job}/checkpoints/{job}-2", 404)
    api.call("POST", f"/v1/jobs/{job}/checkpoints/{job}-2/pin", 404)


def test_deleting_twice_with_one_key_is_answered_twice(api: Api) -> None:
    job = saved(api)
    key = {"Idempotency-Key": f"delete-{job}"}
    for replayed in (None, "true"):
        answer = api.http.delete(f"/v1/jobs/{job}/checkpoints/{job}-1", headers=key)
        assert answer.status_code == 200
        assert answer.headers.get("Idempotent-Replayed") == replayed


def test_checkpoint_that_a_child_goes_on_from_is_refused_until_it_ended(api: Api) -> None:
    job = saved(api)
    api.world.end(job, "EXITED_NONZERO")
    child = api.call("POST", f"/v1/jobs/{job}/retry", 201, json={"checkpoint_id": f"{job}-1"})["job_id"]
    assert child in api.call("DELETE", f"/v1/jobs/{job}/checkpoints/{job}-1", 409)["message"]
    api.call("POST", f"/v1/jobs/{child}/cancel")
    api.call("DELETE", f"/v1/jobs/{job}/checkpoints/{job}-1")


def test_key_that_may_only_view_changes_no_checkpoint(api: Api) -> None:
    job = saved(api)
    viewer = {"Authorization": f"Bearer {api.world.key(api.account_id, KeyScope.VIEW)}"}
    for method, path in (("POST", "/pin"), ("POST", "/unpin"), ("DELETE", "")):
        answer = api.http.request(method, f"/v1/jobs/{job}/checkpoints/{job}-1{path}", headers=viewer)
        assert answer.status_code == 403


def test_usage_counts_what_ran_for_the_account(api: Api) -> None:
    job = api.submit(labels={"team": "vision"})
    api.world.start(job, Share(node_id="here", gpus=(0, 1), cpu_cores=4))
    running = api.call("GET", "/v1/usage?group_by=label:team")
    (row,) = running["rows"]
    assert (row["key"], row["jobs"], row["attempts"]) == ("vision", 1, 1)
    api.world.end(job)
    ended = api.call("GET", "/v1/usage", params={"from": str(time.time() - 3600), "group_by": "job"})
    (row,) = ended["rows"]
    shown = api.show(job)
    assert row["key"] == job
    assert abs(row["gpu_seconds"] - shown["gpu_seconds"]) < 0.1
    assert abs(row["cpu_seconds"] - 2 * row["gpu_seconds"]) < 1e-6
    assert ended["total"] == {**row, "key": ""}
    assert api.call("GET", "/v1/usage?to=1000")["rows"] == []


def test_usage_of_every_account_is_for_those_who_run_the_cluster(api: Api) -> None:
    viewer = {"Authorization": f"Bearer {api.world.key(api.account_id, KeyScope.VIEW)}"}
    assert api.http.get("/v1/usage?all_accounts=true", headers=viewer).status_code == 403
    assert api.http.get("/v1/usage", headers=viewer).status_code == 200
    api.call("GET", "/v1/usage?all_accounts=true&group_by=account")


def test_usage_refuses_what_makes_no_sense(api: Api) -> None:
    for query in (
        "group_by=colour",
        "group_by=label:",
        'group_by=label:a"b',
        "from=yesterday",
        "from=9&to=8",
        "from=-1",
    ):
        error = api.call("GET", f"/v1/usage?{query}", 422)
        assert error["code"] == "VALIDATION_ERROR"
    assert "label:KEY" in api.call("GET", "/v1/usage?group_by=colour", 422)["message"]


def test_collecting_tells_first_and_then_removes(api: Api, world: World) -> None:
    job = saved(api)
    directory = world.directory(world.job(job)).path.parent
    world.end(job)
    context = world.context(
        collector=Collector(world.database, world.roots, RetentionPolicy(runs_s=1, checkpoints_s=1)),
        clock=lambda: time.time() + 3600,
    )
    key = {"Authorization": f"Bearer {api.key}"}
    with (
        Served.serve(context) as served,
        httpx.Client(base_url=served.url, headers=key, timeout=PATIENCE_S, verify=False) as http,
    ):
        dry = http.post("/v1/gc", json={"dry_run": True}).json()["data"]
        by_kind = {kind["what"]: kind for kind in dry["kinds"]}
        assert job in by_kind["run directory"]["names"]
        assert f"{job}-1" in by_kind["checkpoint"]["names"]
        assert not any(kind["removed"] for kind in dry["kinds"])
        assert directory.exists()
        wet = http.post("/v1/gc").json()["data"]
        assert all(kind["removed"] for kind in wet["kinds"] if kind["what"] != "orphan")
        assert not directory.exists()
        assert [each["checkpoint_id"] for each in api.show(job)["checkpoints"]] == [f"{job}-2", f"{job}-3"]
        again = http.post("/v1/gc").json()["data"]
        assert {kind["what"] for kind in again["kinds"]} <= {"orphan"}
        gone = world.roots.path(ARTIFACTS, f"{job}/checkpoints/{job}-1")
        wait_for(lambda: not gone.exists())
        assert http.post("/v1/gc", json={"dry": True}).status_code == 422


def test_collecting_is_for_those_who_run_the_cluster(api: Api) -> None:
    manager = {"Authorization": f"Bearer {api.world.key(api.account_id, KeyScope.VIEW, KeyScope.MANAGE)}"}
    assert api.http.post("/v1/gc", headers=manager).status_code == 403


def test_logs_and_metrics_that_were_removed_are_explained(api: Api) -> None:
    job = api.submit()
    started = api.world.start(job)
    api.world.write(started, "one\n", at=time.time())
    api.world.measure(started, step=1, values={"loss": 1.0})
    api.world.end(job)
    assert api.call("GET", f"/v1/jobs/{job}/logs")["notice"] is None
    shutil.rmtree(api.world.roots.path(RUNS, job))
    page = api.call("GET", f"/v1/jobs/{job}/logs")
    assert (page["lines"], page["complete"]) == ([], True)
    assert "were removed" in page["notice"]
    assert "were removed" in api.call("GET", f"/v1/jobs/{job}/metrics")["notice"]
    for path in ("logs", "metrics/stream"):
        with api.stream(f"/v1/jobs/{job}/{path}") as events:
            assert next(events).event == "end"
    api.call("GET", f"/v1/jobs/{job}/logs?tail=10&attempt=all")


def test_job_that_never_ran_has_no_log_to_explain(api: Api) -> None:
    job = api.submit()
    api.call("POST", f"/v1/jobs/{job}/cancel")
    assert api.call("GET", f"/v1/jobs/{job}/logs")["notice"] is None


# A log that reached its cap.


def cut_log(api: Api, *, ended: bool = True) -> tuple[str, list[str]]:
    """A job whose log lost its middle; the lines that are left."""
    job = api.submit()
    started = api.world.start(job)
    head, middle, tail = ([f"{part} {n}\n" for n in range(50)] for part in ("head", "middle", "tail"))
    api.world.write(started, "".join(head + middle), at=time.time())
    api.world.write(started, "".join(tail), at=time.time())
    size = [len("".join(lines)) for lines in (head, middle)]
    gap = Gap(start=size[0], end=sum(size), cap_bytes=1 << 20)
    api.world.directory(started).remove(log_stream(0, "main", 0, "out"), gap)
    if ended:
        api.world.end(job)
    marker = f"[… {size[1]} bytes removed: the log reached its cap of 1 MiB …]"
    return job, [line.strip() for line in [*head, marker, *tail]]


def messages(page: Any) -> list[str]:
    return [line["message"] for line in page["lines"]]


def test_log_shows_one_line_in_the_place_of_its_gap(api: Api) -> None:
    job, expected = cut_log(api)
    assert messages(api.call("GET", f"/v1/jobs/{job}/logs")) == expected
    with api.stream(f"/v1/jobs/{job}/logs") as events:
        assert [event.json()["message"] for event in events if event.event == "log"] == expected


def test_pages_go_on_over_a_gap(api: Api) -> None:
    job, expected = cut_log(api)
    for limit in (1, 7, 50, 51):
        found: list[str] = []
        cursor: dict[str, str] = {}
        while lines := (page := api.call("GET", f"/v1/jobs/{job}/logs", params={"limit": limit, **cursor}))["lines"]:
            found += [line["message"] for line in lines]
            cursor = {"cursor": page["next_cursor"]}
        assert found == expected


def test_last_lines_end_at_a_gap(api: Api) -> None:
    job, expected = cut_log(api)
    assert messages(api.call("GET", f"/v1/jobs/{job}/logs?tail=5")) == expected[-5:]
    assert messages(api.call("GET", f"/v1/jobs/{job}/logs?tail=51")) == expected[-51:]
    assert messages(api.call("GET", f"/v1/jobs/{job}/logs?tail=80")) == expected[-51:]
    assert messages(api.call("GET", f"/v1/jobs/{job}/logs?since=1000")) == expected


def test_follower_whose_place_was_removed_hears_of_it_and_goes_on(api: Api) -> None:
    job, expected = cut_log(api, ended=False)
    started = api.world.job(job)
    page = api.call("GET", f"/v1/jobs/{job}/logs?limit=60")
    with api.stream(f"/v1/jobs/{job}/logs?cursor={page['next_cursor']}") as events:
        assert next(events).json()["message"] == expected[60]
        # Meanwhile much was written, and all but its end removed.
        api.world.write(started, "more\n" * 10_000, at=time.time())
        path = api.world.directory(started).path / log_stream(0, "main", 0, "out")
        gap = Gap(start=len("".join(f"{line}\n" for line in expected[:50])), end=path.stat().st_size, cap_bytes=1 << 20)
        api.world.directory(started).remove(log_stream(0, "main", 0, "out"), gap)
        api.world.write(started, "last\n", at=time.time())
        rest = []
        for event in events:
            rest.append(event.json()["message"])
            if rest[-1] == "last":
                break
    assert all("\0" not in line for line in rest)
    assert any("bytes removed" in line for line in rest)
