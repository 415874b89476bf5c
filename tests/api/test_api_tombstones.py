"""Deleted jobs whose files are still there: listed, read, and purged by id and by handle."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from api_world import Api

from trainmaster.server.coordinator import tombstones
from trainmaster.server.coordinator.maintenance import Maintenance
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.storage import ARTIFACTS, RUNS


def buried(api: Api, size: int = 100_000, **fields: Any) -> str:
    """A job that was deleted and left two checkpoints, one of them with a file."""
    job_id = api.submit(**fields)
    api.world.start(job_id)
    for step in (1, 2):
        api.world.save(job_id, f"{job_id}-{step}", step)
    directory = api.world.roots.path(ARTIFACTS, f"{job_id}/checkpoints/{job_id}-2")
    directory.mkdir(parents=True)
    (directory / "weights.bin").write_bytes(b"w" * size)
    api.world.end(job_id)
    api.call("DELETE", f"/v1/jobs/{job_id}")
    return job_id


def listed(api: Api, **query: Any) -> list[str]:
    return [each["job_id"] for each in api.call("GET", "/v1/tombstones", params=query)["tombstones"]]


def tidy(api: Api) -> None:
    """Do the leader's maintenance."""
    context = api.world.context()
    Maintenance(context.database, context.roots, leads=lambda: True, collector=context.collector).do()


def test_deleted_jobs_are_listed_while_they_have_files(api: Api) -> None:
    never_ran = api.submit()
    api.call("DELETE", f"/v1/jobs/{never_ran}")
    first, second = buried(api, 100_000, name="first", handle="h"), buried(api, 300_000, name="second")
    newest, older = api.call("GET", "/v1/tombstones")["tombstones"]
    assert [(each["job_id"], each["handle"], each["name"]) for each in (newest, older)] == [
        (second, None, "second"),
        (first, "h", "first"),
    ]
    assert (older["kind"], older["status"]) == ("command", "COMPLETED")
    assert 100_000 <= older["size_bytes"] <= 200_000
    assert 300_000 <= newest["size_bytes"] <= 400_000
    assert older["deleted_at"] == api.call("GET", "/v1/jobs/h/checkpoints")["deleted_at"]
    assert listed(api, job="h") == listed(api, job=first[:-1]) == [first]
    assert listed(api, job="%") == []
    stranger = {"Authorization": f"Bearer {api.world.key('stranger', KeyScope.VIEW)}"}
    assert api.call("GET", "/v1/tombstones", headers=stranger)["tombstones"] == []

    api.call("DELETE", "/v1/jobs/h?purge=true")
    assert listed(api) == [second]  # at once
    tidy(api)
    assert not api.world.roots.path(ARTIFACTS, first).exists()
    assert listed(api) == [second]  # and when it has nothing any more
    assert api.call("GET", f"/v1/jobs/{first}/checkpoints")["checkpoints"] == []


def test_pages_go_on_past_jobs_without_files(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tombstones, "_BATCH", 2)
    monkeypatch.setattr(tombstones, "_BATCHES", 2)
    with_files = [buried(api), buried(api)]
    for _ in range(5):
        api.call("DELETE", f"/v1/jobs/{api.submit()}")
    with_files.append(buried(api))
    seen: list[str] = []
    token, pages = None, 0
    while True:
        page = api.call("GET", "/v1/tombstones", params={"page_size": 2, **({"page_token": token} if token else {})})
        seen += [each["job_id"] for each in page["tombstones"]]
        token, pages = page["next_page_token"], pages + 1
        if token is None:
            break
    assert seen == with_files[::-1]
    assert pages > 1
    for nonsense in ("x", "WyJuYW1lIiwxLCJhIl0"):
        assert api.call("GET", "/v1/tombstones", 422, params={"page_token": nonsense})["code"] == "VALIDATION_ERROR"


def test_checkpoints_of_a_deleted_job_are_found_by_id_and_handle(api: Api) -> None:
    older, newer = buried(api, handle="h"), buried(api, handle="h")
    for name, job_id in ((older, older), (newer, newer), ("h", newer)):
        found = api.call("GET", f"/v1/jobs/{name}/checkpoints")
        assert found["job_id"] == job_id
        assert [each["checkpoint_id"] for each in found["checkpoints"]] == [f"{job_id}-1", f"{job_id}-2"]
        assert found["latest_checkpoint_id"] == f"{job_id}-2"
        files = api.call("GET", f"/v1/jobs/{name}/artifacts", params={"checkpoint_id": f"{job_id}-2"})["artifacts"]
        assert [each["path"] for each in files] == [f"checkpoints/{job_id}-2/weights.bin"]
        content = api.http.get(f"/v1/jobs/{name}/artifacts/{files[0]['path']}").content
        assert content == b"w" * 100_000
        api.call("GET", f"/v1/jobs/{name}", 404)  # the job itself stays hidden
    living = api.submit(handle="h")
    found = api.call("GET", "/v1/jobs/h/checkpoints")
    assert (found["job_id"], found["deleted_at"], found["checkpoints"]) == (living, None, [])
    api.call("DELETE", "/v1/jobs/h?purge=true")
    assert [api.world.job(each).purge for each in (living, newer, older)] == [True, False, False]
    api.call("GET", "/v1/jobs/nothing/checkpoints", 404)


def test_checkpoints_of_a_deleted_job_are_unpinned_and_deleted_but_not_pinned(api: Api) -> None:
    job_id = api.submit(handle="h")
    api.world.start(job_id)
    for step in (1, 2):
        api.world.save(job_id, f"{job_id}-{step}", step)
    api.call("POST", f"/v1/jobs/h/checkpoints/{job_id}-2/pin")
    api.world.end(job_id)
    api.call("DELETE", "/v1/jobs/h")
    assert "was deleted" in api.call("POST", f"/v1/jobs/h/checkpoints/{job_id}-1/pin", 409)["message"]
    assert "unpin it first" in api.call("DELETE", f"/v1/jobs/h/checkpoints/{job_id}-2", 409)["message"]
    api.call("POST", f"/v1/jobs/h/checkpoints/{job_id}-2/unpin")
    left = api.call("DELETE", f"/v1/jobs/h/checkpoints/{job_id}-2")
    assert [each["checkpoint_id"] for each in left["checkpoints"]] == [f"{job_id}-1"]
    assert left["latest_checkpoint_id"] == f"{job_id}-1"
    stranger = {"Authorization": f"Bearer {api.world.key('stranger')}"}
    for name in ("h", job_id):
        api.call("GET", f"/v1/jobs/{name}/checkpoints", 404, headers=stranger)
        api.call("DELETE", f"/v1/jobs/{name}/checkpoints/{job_id}-1", 404, headers=stranger)


def test_checkpoints_of_a_job_class_count_though_they_lie_elsewhere(api: Api) -> None:
    job_id = api.submit(workload={"kind": "job_class", "target": "module:Class"})
    api.world.start(job_id)
    home = f"classes/{api.account_id}/general/default/n/1"
    record = {"type": "checkpoint", "t": 1.0, "checkpoint_id": f"{job_id}-1", "step": 1, "size_bytes": 1_000_000}
    api.world.see(job_id, {**record, "root": ARTIFACTS, "path": home})
    (directory := api.world.roots.path(ARTIFACTS, home)).mkdir(parents=True)
    api.world.end(job_id)
    api.call("DELETE", f"/v1/jobs/{job_id}")
    shutil.rmtree(api.world.roots.path(RUNS, job_id))
    (left,) = api.call("GET", "/v1/tombstones")["tombstones"]
    assert (left["job_id"], left["kind"], left["size_bytes"]) == (job_id, "job_class", 1_000_000)
    api.call("DELETE", f"/v1/jobs/{job_id}?purge=true")
    tidy(api)
    assert not directory.exists()
    assert listed(api) == []
