"""Nodes as `scontrol show node` prints them, and the GPUs that jobs ask for."""

from __future__ import annotations

from typing import Any

import pytest

from trainmaster.backends.slurm.inventory import as_node, choose_gpus, gpu_memory_mb, nodes_of, preferable
from trainmaster.backends.slurm.options import SlurmOptions
from trainmaster.protocol.request import EngineNeeds
from trainmaster.server.core.resources import NodeState

_LINE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=32 CPUAlloc={alloc} CPUEfctv=126 CPUTot=128 CPULoad=4.24 "
    "AvailableFeatures={features} ActiveFeatures=(null) Gres={gres} GresDrain=N/A GresUsed={used} "
    "NodeAddr={address} NodeHostName={name} Version=22.05.8 OS=Linux 5.14 #1 SMP Mon Jan 1 RealMemory=515000 "
    "AllocMem=1000 FreeMem=19240 Sockets=4 Boards=1 MemSpecLimit=5000 State={state} ThreadsPerCore=1 TmpDisk=900000 "
    "Weight=1 Owner=N/A MCS_label=N/A Partitions=gpu,all BootTime=2026-11-18T19:42:52 "
    "CfgTRES=cpu=128,mem=515000M,gres/gpu=8 AllocTRES= ExtSensorsTemp=n/s {rest}"
)


def line(**values: str) -> str:
    defaults = {
        "name": "gpu01",
        "alloc": "0",
        "features": "ib,h100",
        "gres": "gpu:h100:8(S:0-1)",
        "used": "gpu:h100:2(IDX:0,2)",
        "address": "10.0.0.7",
        "state": "IDLE",
        "rest": "",
    }
    return _LINE.format(**{**defaults, **values})


def test_node_has_what_slurm_schedules() -> None:
    node = as_node(nodes_of(line())[0], "hpc", SlurmOptions())
    assert (node.node_id, node.hostname, node.address) == ("hpc:gpu01", "gpu01", "10.0.0.7")
    assert (node.cpu_cores, node.ram_mb, node.storage_mb) == (126, 510_000, 900_000)
    assert [(gpu.index, gpu.device, gpu.type, gpu.memory_mb) for gpu in node.gpus][:2] == [
        (0, "0", "h100", 81_559),
        (1, "1", "h100", 81_559),
    ]
    assert (len(node.gpus), node.labels, node.capabilities) == (8, ("ib", "h100"), ("ib", "h100"))
    assert (node.held_gpus, node.held_ram_mb) == (2, 1000)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("IDLE", NodeState.READY),
        ("MIXED", NodeState.READY),
        ("ALLOCATED+PLANNED", NodeState.READY),
        ("IDLE+CLOUD+POWERED_DOWN", NodeState.READY),
        ("IDLE+RESERVED", NodeState.READY),
        ("IDLE+DRAIN", NodeState.DRAINED),
        ("MIXED+DRAIN", NodeState.DRAINING),
        ("IDLE+MAINT", NodeState.DRAINED),
        ("DOWN", NodeState.OFFLINE),
        ("DOWN*+DRAIN", NodeState.OFFLINE),
        ("IDLE*", NodeState.OFFLINE),
        ("IDLE+NOT_RESPONDING", NodeState.OFFLINE),
        ("UNKNOWN", NodeState.OFFLINE),
        ("FUTURE", NodeState.OFFLINE),
        ("IDLE+INVALID_REG", NodeState.OFFLINE),
    ],
)
def test_state_of_a_node(state: str, expected: NodeState) -> None:
    text = line(state=state, rest="Reason=a = fan, Partitions=x [root@2026-11-18T20:00:00] Comment=call Bob")
    node = as_node(nodes_of(text)[0], "hpc", SlurmOptions())
    assert node.state is expected
    is_ready = expected is NodeState.READY
    assert all(gpu.healthy for gpu in node.gpus)
    assert node.drain_reason == ("" if is_ready else "a = fan, Partitions=x [root@2026-11-18T20:00:00]")
    if not is_ready:
        silent = as_node(nodes_of(line(state=state))[0], "hpc", SlurmOptions())
        assert silent.drain_reason.startswith("Slurm: ")


@pytest.mark.parametrize(
    ("gres", "types"),
    [
        ("(null)", []),
        ("gpu:2", ["gpu", "gpu"]),
        ("gpu:a100:1(S:0,2),gpu:h100:1,shard:8,mps:h100:400", ["a100", "h100"]),
        ("gpu:nvidia_a100_3g.20gb:2(S:0)", ["nvidia_a100_3g.20gb"] * 2),
        ("gpu", ["gpu"]),
        ("gpu:0", []),
    ],
)
def test_gpus_of_a_node(gres: str, types: list[str]) -> None:
    node = as_node(nodes_of(line(gres=gres))[0], "hpc", SlurmOptions())
    assert [gpu.type for gpu in node.gpus] == types
    assert [gpu.index for gpu in node.gpus] == list(range(len(types)))


def test_other_name_of_gpus_is_an_option() -> None:
    node = as_node(nodes_of(line(gres="gpu:1,tpu:v4:2"))[0], "hpc", SlurmOptions(gres="tpu"))
    assert [gpu.type for gpu in node.gpus] == ["v4", "v4"]


@pytest.mark.parametrize(
    ("kind", "memory_mb"),
    [
        ("", 0),
        ("H200", 143_771),
        ("a100_80gb", 81_920),
        ("nvidia_a100_3g.20gb", 20_480),
        ("odd", 0),
        ("v100-32g", 32_768),
    ],
)
def test_memory_of_a_gpu(kind: str, memory_mb: int) -> None:
    assert gpu_memory_mb(kind, SlurmOptions()) == memory_mb
    assert gpu_memory_mb(kind, SlurmOptions(gpu_memory_mb=7)) == (memory_mb or 7)


TYPED = [line(name="a", gres="gpu:h100:4"), line(name="b", gres="gpu:a100:2"), line(name="c", gres="gpu:a100_80gb:6")]
UNTYPED = [line(name="a", gres="gpu:4", features="H100-SXM,ib"), line(name="b", gres="gpu:4", features="ib")]


@pytest.mark.parametrize(
    ("nodes", "needs", "gres", "feature"),
    [
        (TYPED, {"gpus": 0}, "", ""),
        (TYPED, {"gpus": 2}, "gpu:2", ""),
        (TYPED, {"gpus": 2, "gpu_type": "H100"}, "gpu:h100:2", ""),
        # Of the types that fit, the most frequent.
        (TYPED, {"gpus": 2, "gpu_type": "A100"}, "gpu:a100_80gb:2", ""),
        (TYPED[:2], {"gpus": 2, "gpu_type": "A100"}, "gpu:a100:2", ""),
        (TYPED, {"gpus": 2, "gpu_memory_min_mb": 81_900}, "gpu:a100_80gb:2", ""),
        (TYPED, {"gpus": 2, "gpu_memory_min_mb": 40_000}, "gpu:2", ""),
        (TYPED[:1], {"gpus": 2, "gpu_type": "h100"}, "gpu:2", ""),
        (UNTYPED, {"gpus": 1, "gpu_type": "h100"}, "gpu:1", "H100-SXM"),
        ([], {"gpus": 1, "gpu_type": "H100 80GB; rm"}, "gpu:h100_80gb_rm:1", ""),
        ([], {"gpus": 1, "gpu_type": "!"}, "gpu:gpu:1", ""),
    ],
)
def test_gpus_are_asked_for_as_the_cluster_names_them(
    nodes: list[str], needs: dict[str, Any], gres: str, feature: str
) -> None:
    choice = choose_gpus(_needs(**needs), nodes_of("\n".join(nodes)), SlurmOptions())
    assert (choice.gres, choice.feature, choice.problem) == (gres, feature, "")


@pytest.mark.parametrize(
    ("nodes", "needs", "says"),
    [
        (TYPED, {"gpu_type": "b200"}, "of type b200; it has a100 (40960 MB), a100_80gb (81920 MB), h100 (81559 MB)"),
        (TYPED, {"gpu_type": "h100", "gpu_memory_min_mb": 99_000}, "of type h100 with 99000 MB"),
        (UNTYPED, {"gpu_memory_min_mb": 1000}, "gpu (? MB). The option gpu_memory_mb"),
        ([line(gres="(null)")], {}, "no node of the partition has GPUs"),
    ],
)
def test_gpus_that_no_node_has_are_a_problem(nodes: list[str], needs: dict[str, Any], says: str) -> None:
    choice = choose_gpus(_needs(gpus=1, **needs), nodes_of("\n".join(nodes)), SlurmOptions())
    assert says in choice.problem


@pytest.mark.parametrize(
    ("count", "preferred"),
    [(1, ("ib", "fast")), (2, ("ib",)), (3, ())],
)
def test_preference_is_what_enough_nodes_have_together(count: int, preferred: tuple[str, ...]) -> None:
    nodes = nodes_of("\n".join([line(name="a", features="ib,fast"), line(name="b", features="ib,slow")]))
    assert preferable(("ib", "fast", "slow", "unknown"), count, nodes) == preferred


def _needs(**values: Any) -> EngineNeeds:
    return EngineNeeds(account="a", job_name="b", **values)
