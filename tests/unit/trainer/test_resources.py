"""`resources_per_node`: every way to write an amount, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from trainmaster.trainer.resources import nodes_from


def config(**resources: Any) -> dict[str, Any]:
    return nodes_from(1, resources).resource_config


@pytest.mark.parametrize(
    ("memory", "mib"),
    [
        ("1048576", 1),
        (1 << 20, 1),
        ("1024Ki", 1),
        ("512Mi", 512),
        ("10Gi", 10 << 10),
        ("1Ti", 1 << 20),
        ("1Pi", 1 << 30),
        ("1Ei", 1 << 40),
        ("2000k", 2),  # rounded up
        ("512M", 489),
        ("10G", 9537),
        ("1T", 953_675),
        ("1P", 953_674_317),
        ("1E", 953_674_316_407),
        ("1.5Gi", 1536),
        (".5Gi", 512),
        ("1.Gi", 1024),
        ("1e9", 954),
        ("1E9", 954),
        ("1e+9", 954),
        (1.5e9, 1431),
        (" 1Gi ", 1024),
        ("2000000000m", 2),
        ("2000000000000u", 2),
        ("2000000000000000n", 2),
    ],
)
def test_memory_and_storage_are_counted_in_whole_mebibytes(memory: Any, mib: int) -> None:
    assert config(memory=memory)["ram_min_mb"] == mib
    assert config(storage=memory)["storage_min_mb"] == mib


@pytest.mark.parametrize(
    ("cpu", "cores"), [(1, 1), ("4", 4), ("500m", 1), ("1500m", 2), (0.25, 1), (2.0, 2), ("2.1", 3), ("1k", 1000)]
)
def test_cores_are_booked_whole(cpu: Any, cores: int) -> None:
    assert config(cpu=cpu)["cpu_cores"] == cores


@pytest.mark.parametrize("name", ["gpu", "GPU", "nvidia.com/gpu"])
def test_gpus_go_by_their_names(name: str) -> None:
    asked = nodes_from(3, {name: "2"})
    assert (asked.resource_config, asked.ranks_per_node) == ({"node_count": 3, "gpu_count": 6}, 2)


@pytest.mark.parametrize("name", ["mig-1g.5gb", "nvidia.com/mig-1g.5gb", "MIG-1g.5gb"])
def test_slices_of_gpus_go_by_their_profiles(name: str) -> None:
    assert nodes_from(1, {name: 1}).resource_config == {"node_count": 1, "gpu_count": 1, "gpu_type": "mig-1g.5gb"}


def test_names_of_kinds_that_kubernetes_has_are_known_in_any_case() -> None:
    asked = nodes_from(1, {"CPU": 2, "Memory": "1Gi", "Ephemeral-Storage": "2Gi"}).resource_config
    assert asked == {"node_count": 1, "gpu_count": 0, "cpu_cores": 2, "ram_min_mb": 1024, "storage_min_mb": 2048}


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        ({"memory": "10GB"}, r"resources_per_node\['memory'\] must be a number, or one with a unit .* not '10GB'"),
        ({"memory": "ten"}, "must be a number"),
        ({"memory": ""}, "must be a number"),
        ({"memory": "1 Gi"}, "must be a number"),
        ({"memory": None}, "must be a number"),
        ({"memory": -1}, "must be a number"),
        ({"memory": True}, "must be a number"),
        ({"memory": "1e999999999"}, "must be a number"),
        ({"memory": float("inf")}, "must be a number"),
        ({"memory": [1]}, "must be a number"),
        ({"memory": "512m"}, "is less than a mebibyte: '512m' are bytes"),
        ({"memory": 16}, "is less than a mebibyte: 16 are bytes"),
        ({"memory": 0}, "must be more than 0"),
        ({"storage": "100k"}, r"resources_per_node\['storage'\] is less than a mebibyte"),
        ({"cpu": 0}, "must be more than 0"),
        ({"cpu": "2 cores"}, "must be a number"),
        ({"gpu": "500m"}, "must be a whole number, not '500m'"),
        ({"gpu": float("nan")}, "must be a number"),
        ({"mig-1g.5gb": 0.5}, "must be a whole number"),
        ({"gpus": 1}, r"resources_per_node\['gpus'\]: there is no such resource here; known are gpu, cpu, memory"),
        ({1: 1}, "has the key 1"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(resources: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        nodes_from(1, resources)
