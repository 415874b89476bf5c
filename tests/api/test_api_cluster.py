"""Queues, nodes and the cluster as a whole; why jobs wait, and for how long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_world import EVERYTHING, Api, Served, World

from patience import PATIENCE_S
from trainmaster.server.core.accounts import KeyScope
from trainmaster.server.core.resources import Gpu, Node, NodeState, Share
from trainmaster.server.store import nodes


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A cluster of one's own: what waits in it is known."""
    with World.open(tmp_path) as world:
        yield world


@pytest.fixture
def served(world: World) -> Iterator[Served]:
    with Served.serve(world.context()) as served:
        yield served


def machine(world: World, name: str = "n1", gpus: int = 4, problem: str = "", **more: Any) -> Node:
    """Report a machine, all of whose GPUs may have a problem."""
    kind: dict[str, Any] = {"type": "H100-80GB", "memory_mb": 81920, "healthy": not problem, "problem": problem}
    units = tuple(Gpu(index=index, device=str(index), **kind) for index in range(gpus))
    values: dict[str, Any] = {"hostname": name, "cpu_cores": 64, "ram_mb": 64_000, "storage_mb": 1_000_000, **more}
    node = Node(node_id=name, backend="local", last_seen_at=time.time(), gpus=units, **values)
    world.database.write_now(lambda connection: nodes.put(connection, EVERYTHING, [node]))
    return node


def submit(api: Api, gpus: int, **scheduling: Any) -> str:
    job_id = api.submit(resource_config={"gpu_count": gpus}, scheduling_config=scheduling)
    api.world.queue(job_id)
    return job_id


def run(api: Api, *gpus: int, node: str = "n1", **scheduling: Any) -> str:
    job_id = submit(api, len(gpus), **scheduling)
    api.world.start(job_id, Share(node_id=node, gpus=gpus))
    return job_id


def other_account(api: Api) -> Api:
    key = api.world.key("somebody-else")
    http = httpx.Client(
        base_url=api.http.base_url, headers={"Authorization": f"Bearer {key}"}, verify=False, timeout=PATIENCE_S
    )
    return Api(http=http, world=api.world, account_id="somebody-else", key=key)


def test_queue_is_made_changed_listed_and_removed(api: Api) -> None:
    made = api.call("PUT", "/v1/queues/night", json={"weight": 2, "quota_gpus": 8})
    assert (made["name"], made["weight"], made["quota_gpus"], made["depth"]) == ("night", 2.0, 8, 0)
    api.call("PUT", "/v1/queues/night", json={"quota_gpus": 4})
    listed = {queue["name"]: queue for queue in api.call("GET", "/v1/queues")["queues"]}
    assert set(listed) == {"default", "night"}
    assert (listed["night"]["weight"], listed["night"]["quota_gpus"]) == (1.0, 4)
    assert api.world.hints == ["", ""]
    api.call("DELETE", "/v1/queues/night")
    api.call("DELETE", "/v1/queues/night", 404)


def test_queue_with_jobs_and_the_default_queue_cannot_be_removed_and_say_what_to_do(api: Api) -> None:
    api.call("PUT", "/v1/queues/night", json={})
    submit(api, 0, queue="night")
    assert "edit --queue" in api.call("DELETE", "/v1/queues/night", 409)["message"]
    assert "quota of 0" in api.call("DELETE", "/v1/queues/default", 409)["message"]


def test_queue_shows_who_waits_in_order_with_why_and_for_how_long(api: Api, world: World) -> None:
    machine(world)
    run(api, 0, 1, 2, 3, max_runtime_seconds=2400)
    low, high = submit(api, 4, priority=4, max_runtime_seconds=60), submit(api, 4, priority=6, max_runtime_seconds=60)
    queue = api.call("GET", "/v1/queue")
    assert (queue["queue"], queue["depth"], queue["running"], queue["paused"]) == ("default", 2, 1, 0)
    assert [(entry["position"], entry["job_id"]) for entry in queue["entries"]] == [(1, high), (2, low)]
    first, second = queue["entries"]
    assert "the best node has 0 free" in first["reason"]
    assert 2300 < first["estimated_wait_seconds"] <= 2400
    assert second["estimated_wait_seconds"] == pytest.approx(first["estimated_wait_seconds"] + 60, abs=1)
    assert first["wait_seconds"] >= 0
    assert api.show(low)["queue_position"] == 2
    assert api.show(low)["estimated_wait_seconds"] == pytest.approx(second["estimated_wait_seconds"], abs=60)


def test_queue_has_pages_and_refuses_what_is_not_there(api: Api) -> None:
    expected = [submit(api, 8) for _ in range(5)]
    found: list[Any] = []
    params: dict[str, Any] = {"page_size": 2}
    while True:
        page = api.call("GET", "/v1/queue", params=params)
        found += page["entries"]
        if page["next_page_token"] is None:
            break
        params["page_token"] = page["next_page_token"]
    assert [entry["job_id"] for entry in found] == expected
    assert [entry["position"] for entry in found] == [1, 2, 3, 4, 5]
    api.call("GET", "/v1/queue?queue=nope", 404)
    api.call("GET", "/v1/queue?page_token=nope", 422)
    api.call("GET", "/v1/queue?page_size=0", 422)


def test_jobs_of_another_account_are_shown_as_amounts(api: Api, world: World) -> None:
    machine(world)
    holder = run(api, 0, 1, 2, 3, max_runtime_seconds=600)
    waiting = submit(api, 2)
    stranger = other_account(api)
    theirs = submit(stranger, 3)
    first, second = stranger.call("GET", "/v1/queue")["entries"]
    assert (first["position"], first["gpus"], first["priority"]) == (1, 2, 5)
    assert (first["job_id"], first["name"], first["reason"]) == (None, None, None)
    assert second["job_id"] == theirs
    answer = stranger.http.get(f"/v1/jobs/{theirs}")
    assert holder not in answer.text
    assert waiting not in answer.text
    pending = answer.json()["data"]["pending"]
    assert [(blocker["job_id"], blocker["gpus"]) for blocker in pending["blockers"]] == [(None, 4), (None, 2)]
    assert pending["blocker_count"] == 2
    stranger.http.close()


def test_waiting_job_says_in_parts_what_would_let_it_run(api: Api, world: World) -> None:
    machine(world)
    holder = run(api, 0, 1, max_runtime_seconds=2400)
    job = api.show(submit(api, 4))
    pending = job["pending"]
    assert job["pending_reason"] == pending["message"]
    assert pending["code"] == "ROOM"
    assert pending["needs"] == "4 × GPU on one node"
    assert (pending["best_node"]["id"], pending["best_node"]["gpus_free"]) == ("n1", 2)
    (blocker,) = pending["blockers"]
    assert (blocker["job_id"], blocker["queued"], blocker["gpus"]) == (holder, False, 2)
    assert 2300 < blocker["ends_in_seconds"] <= 2400
    assert pending["would_start_if"] == f"{holder} ended"
    assert api.show(holder)["pending"] is None


def test_job_that_no_node_could_run_has_no_estimate(api: Api, world: World) -> None:
    machine(world)
    job = api.show(submit(api, 8, allow_waiting_for_nodes=True))
    assert job["pending"]["code"] == "IMPOSSIBLE"
    assert job["estimated_wait_seconds"] is None


def test_node_is_drained_and_enabled_and_says_so(api: Api, world: World) -> None:
    machine(world)
    drained = api.call("POST", "/v1/nodes/n1/drain", json={"reason": "new disks", "force": True, "grace_seconds": 5})
    assert (drained["state"], drained["drain_reason"], drained["drain_force"]) == ("DRAINING", "new disks", True)
    assert world.hints == [""]
    job = api.show(submit(api, 1))
    assert job["pending"]["code"] == "UNAVAILABLE"
    assert "new disks" in job["pending_reason"]
    enabled = api.call("POST", "/v1/nodes/n1/enable")
    assert (enabled["state"], enabled["drain_reason"], enabled["drain_force"]) == ("READY", None, False)
    assert api.call("POST", "/v1/nodes/n1/enable")["state"] == "READY"
    events = api.call("GET", "/v1/nodes/n1/events")["events"]
    assert [event["type"] for event in events] == ["node_enabled", "node_draining"]
    assert events[1]["data"]["reason"] == "new disks"
    assert len(api.call("GET", "/v1/nodes/n1/events?limit=1")["events"]) == 1


def test_node_is_given_labels_and_capabilities_beside_its_own(api: Api, world: World) -> None:
    machine(world, labels=("rack-1",), capabilities=("infiniband",))
    body = {"labels": ["zone=a", "zone=a"], "capabilities": ["nvlink"]}
    given = api.call("PATCH", "/v1/nodes/n1", json=body)
    assert given["labels"] == ["rack-1", "zone=a"]
    assert given["capabilities"] == ["infiniband", "nvlink"]
    assert (given["given_labels"], given["given_capabilities"]) == (["zone=a"], ["nvlink"])
    kept = api.call("PATCH", "/v1/nodes/n1", json={"labels": []})
    assert (kept["labels"], kept["given_capabilities"]) == (["rack-1"], ["nvlink"])


def test_broken_gpu_is_shown_with_its_problem(api: Api, world: World) -> None:
    machine(world, gpus=1)
    machine(world, gpus=1, problem="Xid 79")
    (gpu,) = api.call("GET", "/v1/nodes/n1")["gpus"]
    assert (gpu["healthy"], gpu["problem"], gpu["free"]) == (False, "Xid 79", False)
    assert api.call("GET", "/v1/nodes/n1/events")["events"][0]["type"] == "gpu_unhealthy"


def test_cluster_is_summed_up(api: Api, world: World) -> None:
    machine(world)
    machine(world, "n2", gpus=2)
    run(api, 0, 1, 2)
    submit(api, 4)
    api.call("POST", "/v1/nodes/n2/drain")
    cluster = api.call("GET", "/v1/cluster")
    assert cluster["nodes"] == {"READY": 1, "DRAINING": 1}
    assert cluster["gpus"] == [{"type": "H100-80GB", "total": 6, "free": 1, "unhealthy": 0}]
    assert cluster["gpu_utilisation"] == 0.5
    assert cluster["jobs"] == {"QUEUED": 1, "TRAINING": 1}
    assert cluster["queue_depth"] == 1
    assert cluster["backends"] == ["local"]
    assert cluster["leader"] is None
    assert cluster["version"]


def test_reading_the_cluster_needs_view_and_changing_it_cluster_admin(api: Api, world: World) -> None:
    machine(world)
    viewer = {"Authorization": f"Bearer {world.key(api.account_id, KeyScope.VIEW)}"}
    manager = {"Authorization": f"Bearer {world.key(api.account_id, KeyScope.MANAGE)}"}
    for route in ("/v1/queues", "/v1/queue", "/v1/cluster", "/v1/nodes/n1/events"):
        api.call("GET", route, headers=viewer)
        api.call("GET", route, 403, headers=manager)
    for method, route in (("PUT", "/v1/queues/x"), ("DELETE", "/v1/queues/x"), ("POST", "/v1/nodes/n1/drain")):
        assert "cluster_admin" in api.call(method, route, 403, headers=manager)["message"]
    assert api.call("GET", "/v1/nodes/n1")["state"] == NodeState.READY
