"""The containers that a worker on the machine runs: those of steps that have images of their own, and then that of its
node, or those of its ranks where the image has no Python. Pure.

They are written down in a plan, which is read by `outside`: step -> its containers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainmaster.backends.base import LaunchError
from trainmaster.backends.container.container_spec import (
    OF_CLAIMED,
    OF_STEPS,
    SECRETS,
    ImageFacts,
    Surroundings,
    container_document,
    container_name,
    outside_document,
    unknown_image,
    within_container,
)
from trainmaster.backends.container.gangs import sized
from trainmaster.protocol.launch import Gang, Step
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest, Within
from trainmaster.protocol.run_directory import PREPARED

_OF_THE_NODE = ("Entrypoint", "Cmd", "Hostname", "NetworkingConfig", "ExposedPorts")
_OF_ITS_HOST = ("DeviceRequests", "PortBindings")
"""What the node's container has, and that of a step before it has not."""


def check_steps(request: AttemptRequest, images: Mapping[str, ImageFacts]) -> None:
    """See that each step that has an image of its own can run in it.

    Raises:
        LaunchError: one cannot.
    """
    for step, image in _with_images(request):
        facts = images[image]
        if step.python and facts.python is None:
            message = f"{step.name}: image {image} does not run Python code of ours: {facts.lacks}"
            raise LaunchError(message, Reason.LAUNCH_REFUSED)
        if not (step.argv or facts.entrypoint or facts.command):
            message = f"{step.name}: image {image} has no command of its own, which would fetch something"
            raise LaunchError(message, Reason.LAUNCH_REFUSED)


def plan_document(
    request: AttemptRequest,
    node: int,
    image: ImageFacts,
    images: Mapping[str, ImageFacts],
    around: Surroundings,
    *,
    engine: str,
) -> dict[str, Any]:
    """The plan of a node's worker.

    Args:
        request: the attempt.
        node: the index of the node.
        image: the job's.
        images: those of steps that have their own, by name.
        around: what all containers have in common.
        engine: where it listens.
    """
    name, each = container_name(request, node), request.launch.ranks_per_node
    containers: dict[str, dict[str, Any]] = {
        step.name: {
            **_gang(f"{name}-{step.name}", step_document(request, node, step, images[own], around), step.gang),
            "reports": step.python,
            "secrets": None,
        }
        for step, own in _with_images(request)
    }
    last = request.launch.steps[-1].name
    if image.python is None:
        document = outside_document(request, node, image, around)
        ranks = [f"{name}-{rank}" for rank in range(node * each, (node + 1) * each)]
        containers[last] = {"names": ranks, "document": document, "reports": True, "secrets": None}
    else:
        document = container_document(request, node, image, around, writes=OF_CLAIMED)
        handed = str(around.secrets / name)
        containers[last] = {"names": [name], "document": document, "reports": True, "secrets": handed}
    return {"engine": engine, "containers": containers, "port": around.port}


def planned_names(plan: Mapping[str, Any]) -> list[str]:
    """What the containers of a plan are called."""
    return [name for planned in plan["containers"].values() for name in planned["names"]]


def within_outside(
    request: AttemptRequest,
    node: int,
    image: ImageFacts,
    images: Mapping[str, ImageFacts],
    around: Surroundings,
    *,
    leads: tuple[str, ...],
) -> Within:
    """What is different for a worker that stays outside; `leads` is what runs `outside` with its plan."""
    through = {
        step.name: (*leads, step.name, *((str(images[own].python),) if step.python else ()))
        for step, own in _with_images(request)
    }
    last = request.launch.steps[-1].name
    within = replace(within_container(request, node, image, around), first_step=None)
    if image.python is None:
        # A service is published on this machine, where the worker is.
        address = within.address if around.port is None else None
        return replace(within, through={**through, last: (*leads, last)}, address=address)
    return replace(within, through=through, onward=(*leads, last))


def step_documents(request: AttemptRequest, node: int, around: Surroundings) -> list[dict[str, Any]]:
    """The containers of steps that have images of their own, before more is known of those than their names."""
    return [step_document(request, node, step, unknown_image(own), around) for step, own in _with_images(request)]


def step_document(
    request: AttemptRequest, node: int, step: Step, image: ImageFacts, around: Surroundings
) -> dict[str, Any]:
    """The container of a step that has an image of its own, but for its variables and its command.

    Our own code in there sees what it would see in the node's container. Another's sees the job's volumes, and where to
    leave what it fetches.
    """
    document = container_document(request, node, image, around, writes=OF_STEPS)
    document = {key: value for key, value in document.items() if key not in _OF_THE_NODE}
    host = {key: value for key, value in document["HostConfig"].items() if key not in _OF_ITS_HOST}
    if step.python:
        mounts = [mount for mount in host["Mounts"] if mount["Target"] != SECRETS]
    else:
        volumes = {volume.target for volume in request.launch.volumes}
        mounts = [mount for mount in host["Mounts"] if mount["Target"] in volumes]
        mounts = [mount for mount in mounts if mount["Target"] not in step.outputs]
        for target, path in step.outputs.items():
            source = str(_prepared(node, around) / path)
            mounts.append({"Type": "bind", "Source": source, "Target": target, "ReadOnly": False})
        document |= {"Env": [], "WorkingDir": ""}
    return {**document, "HostConfig": {**host, "Mounts": mounts}}


def output_directories(request: AttemptRequest, node: int, around: Surroundings) -> list[Path]:
    """Where steps leave something for the ranks of their node; each has to be there before it is mounted."""
    return [_prepared(node, around) / path for step in request.launch.steps for path in step.outputs.values()]


def _with_images(request: AttemptRequest) -> Iterator[tuple[Step, str]]:
    return ((step, step.image) for step in request.launch.steps if step.image is not None)


def _prepared(node: int, around: Surroundings) -> Path:
    return around.run_dir / "nodes" / str(node) / PREPARED


def _gang(name: str, document: dict[str, Any], gang: Gang | None) -> dict[str, Any]:
    """The container of a step, and after it those of its gang, if it has one."""
    if gang is None:
        return {"names": [name], "document": document}
    return {
        "names": [name, *(f"{name}-{index}" for index in range(gang.count))],
        "document": sized(document, gang.head),
        "gang": {"document": sized(document, gang.size), "argv": gang.argv},
    }
