"""A job that no node could ever hold is refused when it is submitted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from api_world import COMMAND, EVERYTHING, VAULT, Api, Served, World
from fireworks_world import door_of, knowing
from tinker_world import Client, TinkerWorld

from trainmaster.backends import capabilities_of
from trainmaster.server.coordinator.admission import Admission
from trainmaster.server.coordinator.admission_checks import FRESH_S, Capacity
from trainmaster.server.coordinator.commands import Commands
from trainmaster.server.core.errors import RefusedError
from trainmaster.server.core.resources import Gpu, Node, NodeState
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.store import nodes
from trainmaster.server.store.scope import Scope


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A cluster of one's own."""
    with World.open(tmp_path) as world:
        yield world


@pytest.fixture
def served(world: World) -> Iterator[Served]:
    with Served.serve(world.context()) as served:
        yield served


def report(
    world: World,
    *names: str,
    gpus: int = 4,
    kind: str = "H100-80GB",
    healthy: bool = True,
    **more: Any,
) -> None:
    """Report machines that are alike."""
    units = tuple(
        Gpu(index=index, device=str(index), type=kind, memory_mb=81920, healthy=healthy) for index in range(gpus)
    )
    values: dict[str, Any] = {"cpu_cores": 64, "ram_mb": 64_000, "storage_mb": 1_000, "slots": 2, **more}
    found = [
        Node(node_id=name, backend="local", hostname=name, last_seen_at=time.time(), gpus=units, **values)
        for name in names
    ]
    world.database.write_now(lambda connection: nodes.put(connection, EVERYTHING, found))


IMPOSSIBLE = [
    ({"gpu_count": 5}, "5 × GPU on one node: no node has 5 × GPU; the largest has 4"),
    ({"gpu_count": 1, "gpu_type": "B200"}, "no node has a GPU of type B200; there are: H100-80GB"),
    ({"gpu_count": 1, "gpu_memory_min_mb": 90_000}, "the largest GPU has 81920 MB"),
    ({"gpu_type": "B200"}, "1 × B200 on one node: no node has a GPU of type B200"),
    ({"gpu_memory_min_mb": 90_000}, "the largest GPU has 81920 MB"),
    ({"gpu_count": 0, "cpu_cores": 65}, "no node has 65 cores; the largest has 64"),
    ({"gpu_count": 0, "ram_min_mb": 64_001}, "no node has 64001 MB of memory; the largest has 64000"),
    ({"gpu_count": 12, "node_count": 3}, "at most 2 of its 3 nodes fit at once"),
]


def test_job_that_no_node_could_hold_is_refused_with_the_nearest(api: Api, world: World) -> None:
    report(world, "n1", "n2")
    for resources, why in IMPOSSIBLE:
        document = {**COMMAND, "resource_config": resources}
        for path in ("/v1/jobs", "/v1/jobs/validate"):
            error = api.call("POST", path, 400, json=document)
            assert error["details"][0]["field"] == "resource_config"
            assert "no node could ever hold" in error["message"]
            assert why in error["message"]
            assert "scheduling_config.allow_waiting_for_nodes" in error["message"]
        waiting = {**document, "scheduling_config": {"allow_waiting_for_nodes": True}}
        api.call("POST", "/v1/jobs/validate", json=waiting)
        job_id = api.call("POST", "/v1/jobs", 201, json=waiting)["job_id"]
        world.queue(job_id)
        assert api.show(job_id)["pending"]["code"] == "IMPOSSIBLE"


@pytest.mark.parametrize("described", [{"gpu_type": "H100"}, {"gpu_memory_min_mb": 1}])
def test_job_that_describes_a_gpu_does_not_run_without_one(api: Api, world: World, described: dict[str, Any]) -> None:
    report(world, "n1", gpus=0)
    api.submit(resource_config={})
    error = api.call("POST", "/v1/jobs", 400, json={**COMMAND, "resource_config": described})
    assert "no node has a GPU" in error["message"]


def test_job_with_a_capability_that_no_node_has_is_refused(api: Api, world: World) -> None:
    report(world, "n1")
    wanted = {**COMMAND, "scheduling_config": {"required_capabilities": ["nvlink"]}}
    assert "no node has the capability nvlink" in api.call("POST", "/v1/jobs", 400, json=wanted)["message"]


def test_node_that_is_full_drained_or_offline_counts(api: Api, world: World) -> None:
    report(world, "n1", "n2", "n3", gpus=0)
    report(world, "n1", gpus=8)
    whole = {"gpu_count": 8}
    api.submit(resource_config=whole)
    api.submit(resource_config=whole)
    api.call("POST", "/v1/nodes/n1/drain", json={})
    api.submit(resource_config=whole)
    report(world, "n2", gpus=16, state=NodeState.OFFLINE)
    api.submit(resource_config={"gpu_count": 16})
    report(world, "n3", gpus=32, healthy=False)
    api.submit(resource_config={"gpu_count": 32})


def test_free_disk_space_may_come_back(api: Api, world: World) -> None:
    report(world, "n1", storage_mb=10)
    api.submit(resource_config={"gpu_count": 0, "storage_min_mb": 1_000})


def test_node_that_was_added_since_counts_at_once(api: Api, world: World) -> None:
    report(world, "n1")
    wanted = {**COMMAND, "resource_config": {"gpu_count": 8}}
    api.call("POST", "/v1/jobs", 400, json=wanted)
    report(world, "n2", gpus=8)
    api.call("POST", "/v1/jobs", 201, json=wanted)


def test_job_that_may_run_for_longer_than_the_engine_allows_is_refused(api: Api, world: World) -> None:
    report(world, "n1", time_limit_s=3600.0)
    longer = {**COMMAND, "scheduling_config": {"max_runtime_seconds": 3601}}
    for path in ("/v1/jobs", "/v1/jobs/validate"):
        error = api.call("POST", path, 400, json=longer)
        assert error["details"][0]["field"] == "scheduling_config.max_runtime_seconds"
        assert "lets no job run for longer than 3600 s" in error["message"]
    api.submit(scheduling_config={"max_runtime_seconds": 3600})
    api.submit()  # the engine ends it when the time is up
    report(world, "n2")  # its limit is not known
    api.submit(scheduling_config={"max_runtime_seconds": 3601})


def test_job_is_taken_while_no_node_is_known(api: Api) -> None:
    api.submit(resource_config={"gpu_count": 8})


def test_retry_with_other_resources_is_checked_and_one_with_the_same_is_not(api: Api, world: World) -> None:
    report(world, "n1", gpus=8)
    job_id = api.submit(resource_config={"gpu_count": 8})
    api.call("POST", f"/v1/jobs/{job_id}/cancel")
    more = {"modify_resources": True, "new_resource_config": {"gpu_count": 16}}
    assert "no node could ever hold" in api.call("POST", f"/v1/jobs/{job_id}/retry", 400, json=more)["message"]
    report(world, "n1", gpus=4)
    api.call("POST", f"/v1/jobs/{job_id}/retry", 201, json={})


def test_trainer_that_no_node_could_hold_is_refused_by_the_fireworks_door(world: World, tmp_path: Path) -> None:
    (tmp_path / "door").mkdir()
    report(world, "n1")
    with knowing(world, tmp_path / "door") as served, door_of(world, served, "account") as door:
        wanted = {"config_acceleratorType": "NVIDIA_H100_80GB", "config_acceleratorCount": 8}
        error = door.create("large", 400, **wanted)
        assert "no node has 8 × H100" in error["message"]
        door.create("small", **{**wanted, "config_acceleratorCount": 4})


def test_model_whose_trainer_no_node_could_hold_fails_at_the_tinker_door(tmp_path: Path) -> None:
    with TinkerWorld.open(tmp_path) as world, Served.serve(world.context()) as served:
        report(world, "n1", kind="mig-1g.5gb")
        with Client.of(served, world) as client:
            answer = client.result(client.ask_for_model(client.session()))
            assert "no node could ever hold 1 × GPU" in answer["error"]
            assert not client.jobs()


def test_server_with_an_autoscaler_queues_what_no_node_holds_yet(world: World) -> None:
    report(world, "n1")
    request = parse_submit({**COMMAND, "resource_config": {"gpu_count": 64}})
    scope = Scope(account_id="account")
    world.key("account")
    refusing, scaling = commands(world, Capacity()), commands(world, Capacity(autoscaling=True))
    with pytest.raises(RefusedError, match="no node could ever hold"):
        refusing.submit(scope, request, created_by="tester").result()
    assert scaling.submit(scope, request, created_by="tester").result().job.needs.gpus_per_node == 64


def test_node_that_is_gone_does_not_count_for_long(world: World) -> None:
    report(world, "n1", gpus=8)
    world.key("account")
    now = 0.0
    accepting = commands(world, Capacity(clock=lambda: now))
    request = parse_submit({**COMMAND, "resource_config": {"gpu_count": 8}})
    scope = Scope(account_id="account")
    accepting.submit(scope, request, created_by="tester").result()
    report(world, "n1", gpus=4)
    now = FRESH_S
    with pytest.raises(RefusedError, match="the largest has 4"):
        accepting.submit(scope, request, created_by="tester").result()


def gang(count: int, *, waits: bool = False, **resources: Any) -> Any:
    document = {**COMMAND, "resource_config": {"gpu_count": count, "node_count": count, **resources}}
    return parse_submit({**document, "scheduling_config": {"allow_waiting_for_nodes": waits}})


def test_gang_whose_nodes_each_need_another_node_is_refused_if_there_are_too_few(world: World) -> None:
    """The GPUs and cores would do for it, and drained and offline nodes may come back."""
    report(world, "n1", pool="local")
    report(world, "n2", pool="local", state=NodeState.DRAINED)
    report(world, "n3", pool="local", state=NodeState.OFFLINE)
    report(world, "n4", pool="local", gpus=0)
    world.key("account")
    scope = Scope(account_id="account")
    sharing, apart = commands(world, Capacity()), commands(world, Capacity(), job_nodes_apart=True)
    apart.submit(scope, gang(3), created_by="tester").result()
    with pytest.raises(RefusedError) as refused:
        apart.submit(scope, gang(4), created_by="tester").result()
    assert refused.value.problems[0].field == "resource_config.node_count"
    assert refused.value.message.endswith(
        "local could never hold 1 × GPU on each of 4 nodes: each of them runs on a node of its own, and local has "
        "3 nodes that could hold one. Ask for at most 3 nodes; or, if such nodes will be added, set "
        "scheduling_config.allow_waiting_for_nodes to true, and the job waits for them"
    )
    apart.submit(scope, gang(4, gpu_count=0), created_by="tester").result()
    apart.submit(scope, gang(4, waits=True), created_by="tester").result()
    sharing.submit(scope, gang(4), created_by="tester").result()
    scaling = commands(world, Capacity(autoscaling=True), job_nodes_apart=True)
    scaling.submit(scope, gang(4), created_by="tester").result()


def test_gang_is_taken_while_no_node_of_its_cluster_is_known(world: World) -> None:
    world.key("account")
    accepting = commands(world, Capacity(), job_nodes_apart=True)
    accepting.submit(Scope(account_id="account"), gang(5), created_by="tester").result()


def commands(world: World, capacity: Capacity, **capabilities: Any) -> Commands:
    backends = {"local": replace(capabilities_of("local"), **capabilities)}
    return Commands(
        world.database,
        admission=Admission(backends=backends, default_backend="local", capacity=capacity),
        vault=VAULT,
        hint=lambda subject: None,
    )
