"""The nodes of a Ray cluster, from what its dashboard answers."""

from __future__ import annotations

from typing import Any

from trainmaster.backends.ray.inventory import nodes_from
from trainmaster.server.core.resources import Gpu, Node


def state(node_id: str = "aa11bb22", ip: str = "10.0.0.1", **more: Any) -> dict[str, Any]:
    resources = {"CPU": 16.0, "memory": float(64 << 30), "object_store_memory": 1.0, f"node:{ip}": 1.0}
    known = {"node_id": node_id, "node_ip": ip, "node_name": ip, "state": "ALIVE", "resources_total": resources}
    return {**known, "labels": {"ray.io/node-id": node_id}, **more}


def with_resources(**resources: float) -> dict[str, Any]:
    return state(resources_total={"CPU": 16.0, **resources})


def test_node_has_what_ray_gives_to_jobs() -> None:
    assert nodes_from("cluster", [state()]) == [
        Node(
            node_id="cluster:10.0.0.1",
            backend="cluster",
            hostname="10.0.0.1",
            address="10.0.0.1",
            cpu_cores=16,
            ram_mb=65536,
            storage_mb=0,
            slots=16,
        )
    ]


def test_nodes_that_are_dead_or_take_no_jobs_are_left_out() -> None:
    head = state("bb", "10.0.0.2", resources_total={"memory": 1.0})
    assert nodes_from("cluster", [state(state="DEAD"), head]) == []


def test_nodes_of_one_address_have_ids_of_their_own() -> None:
    nodes = nodes_from("cluster", [state("aaaaaaaa"), state("bbbbbbbb"), state("cc", "10.0.0.2")])
    assert [node.node_id for node in nodes] == [
        "cluster:10.0.0.1-aaaaaa",
        "cluster:10.0.0.1-bbbbbb",
        "cluster:10.0.0.2",
    ]


def test_gpus_have_the_memory_of_their_type_unless_the_machine_says_more() -> None:
    of_ray = with_resources(GPU=2.0, **{"accelerator_type:H100": 1.0})
    assert nodes_from("cluster", [of_ray])[0].gpus == tuple(
        Gpu(index=index, device=str(index), type="H100", memory_mb=81920) for index in (0, 1)
    )
    gpus = [
        {"index": index, "name": "NVIDIA A100-SXM4-80GB", "memoryUsed": 512, "memoryTotal": 81559} for index in (0, 1)
    ]
    summary = [
        {"hostname": "worker-1", "raylet": {"nodeId": "aa11bb22"}, "gpus": gpus, "disk": {"/": {"free": 1 << 30}}}
    ]
    (node,) = nodes_from("cluster", [with_resources(GPU=2.0, **{"accelerator_type:A100": 1.0})], summary)
    assert node.gpus[1] == Gpu(index=1, device="1", type="A100-80GB", memory_mb=81559, used_mb=512)
    assert (node.hostname, node.storage_mb) == ("worker-1", 1024)


def test_labels_and_custom_resources_can_be_required() -> None:
    labels = {"ray.io/node-id": "aa", "ray.io/availability-region": "eu", "pool": "a"}
    (node,) = nodes_from("cluster", [{**with_resources(infiniband=1.0), "labels": labels}])
    assert node.labels == ("pool=a", "ray.io/availability-region=eu", "region=eu")
    assert node.tags == {"pool=a", "ray.io/availability-region=eu", "region=eu", "infiniband"}


def test_what_is_in_use_is_held_in_whole_units() -> None:
    usage = {"aa11bb22": {"CPU": [3.5, 16.0], "GPU": [0.5, 2.0], "memory": [float(2 << 30), float(64 << 30)]}}
    (node,) = nodes_from("cluster", [state()], usage=usage)
    assert (node.held_cpu_cores, node.held_gpus, node.held_ram_mb) == (4, 1, 2048)
