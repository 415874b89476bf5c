"""Plans of steps that have images of their own: what those see, and how the node goes on after them. No engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from container_around import AROUND

from trainmaster.backends.base import LaunchError
from trainmaster.backends.container.container_spec import unknown_image
from trainmaster.backends.container.plans import (
    check_steps,
    output_directories,
    plan_document,
    planned_names,
    within_outside,
)
from trainmaster.protocol.launch import Launch, LaunchStep, VolumeMount
from trainmaster.protocol.request import AttemptRequest, ContainerOverrides, NodeAssignment

IMAGE = unknown_image("sha256:job")
FETCHES = replace(unknown_image("sha256:fetch"), entrypoint=("fetch",), python=None, lacks="it has no python3")
IMAGES = {"fetch:1": FETCHES, "cache:1": unknown_image("sha256:cache")}
FETCH = LaunchStep(name="model-initializer", argv=(), image="fetch:1", outputs={"/workspace/model": "model"})
SHARD = LaunchStep(name="dataset-initializer", argv=("-m", "ours"), python=True, image="cache:1")
REQUEST = AttemptRequest(
    job_id="job-1",
    attempt=2,
    token="secret-token",
    rank_token="rank-token",
    launch=Launch(
        kind="command",
        steps=(
            FETCH,
            SHARD,
            LaunchStep(name="environment", argv=("-m", "packages"), python=True),
            LaunchStep(name="main", argv=("x",)),
        ),
        volumes=(VolumeMount(source="/data/mirror", target="/mirror", read_only=True),),
        ranks_per_node=2,
    ),
    nodes=tuple(NodeAssignment(node_id="a", cpu_cores=2, memory_mb=512, gpus=("0",)) for _ in range(2)),
    checkpoint_dir="/srv/artifacts/job-1/checkpoints",
    output_dir="/srv/artifacts/job-1/output",
    owner_file="/srv/runs/job-1/owner.json",
    cache_dir="/srv/cache/team",
)


def planned(node: int = 0, **facts: Any) -> dict[str, Any]:
    plan = plan_document(REQUEST, node, replace(IMAGE, **facts), IMAGES, AROUND, engine="unix:///engine.sock")
    containers: dict[str, Any] = plan["containers"]
    return containers


def targets(document: dict[str, Any], *, writable: bool = False) -> set[str]:
    return {each["Target"] for each in document["HostConfig"]["Mounts"] if not (writable and each["ReadOnly"])}


def test_image_that_fetches_sees_volumes_and_where_to_leave_what_it_fetched() -> None:
    step = planned(node=1)["model-initializer"]
    document = step["document"]
    assert (document["Image"], step["reports"], document["Env"]) == ("sha256:fetch", False, [])
    assert targets(document) == {"/mirror", "/workspace/model"}
    (made,) = output_directories(REQUEST, 1, AROUND)
    assert [each["Source"] for each in document["HostConfig"]["Mounts"]] == ["/data/mirror", str(made)]
    assert made == AROUND.run_dir / "nodes/1/prepared/model"
    # It runs by itself, as the image says; on what is booked, but for GPUs.
    assert not {"Entrypoint", "Cmd", "Hostname", "NetworkingConfig"} & document.keys()
    assert (document["HostConfig"]["Memory"], "DeviceRequests" in document["HostConfig"]) == (512 << 20, False)


def test_nobody_who_comes_after_a_claim_can_write_to_it() -> None:
    containers = planned()
    claims, home = str(AROUND.run_dir / "claims"), str(AROUND.run_dir / "nodes/0")
    for step in containers.values():
        assert claims not in targets(step["document"], writable=True)
    assert home in targets(containers["main"]["document"], writable=True)
    ours = containers["dataset-initializer"]["document"]
    assert "/trainmaster/secrets" not in targets(ours)
    assert [line for line in ours["Env"] if line.startswith("PYTHONPATH=")]


def test_node_goes_on_in_its_container_where_the_steps_outside_have_ended() -> None:
    containers = planned(node=1)
    assert containers["main"]["names"] == ["tm-job-1.2-1"]
    assert containers["main"]["secrets"] == "/dev/shm/trainmaster-0/tm-job-1.2-1"
    within = within_outside(REQUEST, 1, IMAGE, IMAGES, AROUND, leads=("lead", "plan"))
    assert within.onward == ("lead", "plan", "main")
    assert within.through == {
        "model-initializer": ("lead", "plan", "model-initializer"),
        "dataset-initializer": ("lead", "plan", "dataset-initializer", "python3"),
    }
    outside = ContainerOverrides.from_json(within.to_json()).amend(REQUEST, 1).launch
    assert [(step.name, step.python) for step in outside.steps] == [
        ("model-initializer", False),
        ("dataset-initializer", False),
        ("main", False),
    ]
    inside = replace(within, through={}, onward=(), first_step="environment").amend(REQUEST, 1).launch
    assert [step.name for step in inside.steps] == ["environment", "main"]


def test_ranks_without_python_are_run_by_the_worker_that_ran_the_steps() -> None:
    containers = planned(node=1, python=None)
    assert containers["main"]["names"] == ["tm-job-1.2-1-2", "tm-job-1.2-1-3"]
    without = replace(IMAGE, python=None)
    within = within_outside(REQUEST, 1, without, IMAGES, AROUND, leads=("lead", "plan"))
    assert (within.onward, within.through["main"]) == ((), ("lead", "plan", "main"))
    assert planned_names({"containers": containers}) == [
        "tm-job-1.2-1-model-initializer",
        "tm-job-1.2-1-dataset-initializer",
        "tm-job-1.2-1-2",
        "tm-job-1.2-1-3",
    ]


def test_image_that_cannot_fetch_is_refused() -> None:
    check_steps(REQUEST, IMAGES)
    with pytest.raises(LaunchError, match="model-initializer: image fetch:1 has no entrypoint or command"):
        check_steps(REQUEST, {**IMAGES, "fetch:1": replace(FETCHES, entrypoint=())})
    with pytest.raises(LaunchError, match=r"dataset-initializer: image cache:1 has no usable Python.*no python3"):
        check_steps(REQUEST, {**IMAGES, "cache:1": FETCHES})
