"""The plan of a worker outside of its containers: which containers it runs for each step.

These are the containers of steps with images of their own, and then that of the node, or those of its ranks if the
image has no Python. `supervision` reads the plan; the server knows by it what to end and to remove. Plans lie in the
server's own directory, which no container has mounted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainmaster.backends.base import LaunchError
from trainmaster.backends.container import container_spec as spec
from trainmaster.protocol.documents import read_document, write_document
from trainmaster.protocol.launch import ContainerLimits, Gang, LaunchStep
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest, ContainerOverrides
from trainmaster.protocol.run_directory import PREPARED, RunDirectory, exit_document


class Plans:
    """One document for each node whose worker is outside."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, request: AttemptRequest, node: int) -> Path:
        return self._directory / f"{request.attempt_id}.{node}.json"

    def read(self, request: AttemptRequest, node: int) -> dict[str, Any] | None:
        """The plan of a node; None if its worker is inside."""
        return read_document(self.path(request, node))

    def write(self, request: AttemptRequest, node: int, plan: Mapping[str, Any], directory: RunDirectory) -> Path:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.clear()
        path = self.path(request, node)
        write_document(path, {**plan, "run_dir": str(directory.path), "node": node})
        return path

    def remove(self, request: AttemptRequest, node: int) -> None:
        self.path(request, node).unlink(missing_ok=True)

    @property
    def are_any(self) -> bool:
        return any(self._directory.glob("*.json"))

    def clear(self) -> None:
        """Remove the plans of nodes that have ended, and of jobs that are gone."""
        for path in self._directory.glob("*.json"):
            if (plan := read_document(path)) is None:
                continue  # somebody else has
            directory = RunDirectory(Path(plan["run_dir"]))
            if not directory.path.exists() or directory.document(exit_document(plan["node"])) is not None:
                path.unlink(missing_ok=True)


_OF_THE_NODE = ("Entrypoint", "Cmd", "Hostname", "NetworkingConfig", "ExposedPorts")
_OF_ITS_HOST = ("DeviceRequests", "PortBindings")
"""Keys that only the node's container has, not those of steps before it."""


def check_steps(request: AttemptRequest, images: Mapping[str, spec.ImageFacts]) -> None:
    """Raises LaunchError if a step cannot run in the image that it names."""
    for step, image in _with_images(request):
        facts = images[image]
        if step.python and facts.python is None:
            message = f"{step.name}: image {image} has no usable Python: {facts.lacks}"
            raise LaunchError(message, Reason.LAUNCH_REFUSED)
        if not (step.argv or facts.entrypoint or facts.command):
            message = f"{step.name}: image {image} has no entrypoint or command; use an initializer image that has one"
            raise LaunchError(message, Reason.LAUNCH_REFUSED)


def plan_document(
    request: AttemptRequest,
    node: int,
    image: spec.ImageFacts,
    images: Mapping[str, spec.ImageFacts],
    context: spec.ContainerContext,
    *,
    engine: str,
) -> dict[str, Any]:
    """The plan of a node's worker; `images` are those of steps that have their own, by name."""
    name, each = spec.container_name(request, node), request.launch.ranks_per_node
    containers: dict[str, dict[str, Any]] = {
        step.name: {
            **_gang(f"{name}-{step.name}", step_document(request, node, step, images[own], context), step.gang),
            "reports": step.python,
            "secrets": None,
        }
        for step, own in _with_images(request)
    }
    last = request.launch.steps[-1].name
    if image.python is None:
        document = spec.outside_document(request, node, image, context)
        ranks = [f"{name}-{rank}" for rank in range(node * each, (node + 1) * each)]
        containers[last] = {"names": ranks, "document": document, "reports": True, "secrets": None}
    else:
        document = spec.container_document(request, node, image, context, writes=spec.OF_CLAIMED)
        handed = str(context.secrets / name)
        containers[last] = {"names": [name], "document": document, "reports": True, "secrets": handed}
    return {"engine": engine, "containers": containers, "port": context.port}


def planned_names(plan: Mapping[str, Any]) -> list[str]:
    return [name for planned in plan["containers"].values() for name in planned["names"]]


def within_outside(
    request: AttemptRequest,
    node: int,
    image: spec.ImageFacts,
    images: Mapping[str, spec.ImageFacts],
    context: spec.ContainerContext,
    *,
    leads: tuple[str, ...],
) -> ContainerOverrides:
    """What differs for a worker outside; `leads` is the command that runs `supervision` with its plan."""
    through = {
        step.name: (*leads, step.name, *((str(images[own].python),) if step.python else ()))
        for step, own in _with_images(request)
    }
    last = request.launch.steps[-1].name
    within = replace(spec.within_container(request, node, image, context), first_step=None)
    if image.python is None:
        # A service is published on this machine, where the worker is.
        address = within.address if context.port is None else None
        return replace(within, through={**through, last: (*leads, last)}, address=address)
    return replace(within, through=through, onward=(*leads, last))


def step_documents(request: AttemptRequest, node: int, context: spec.ContainerContext) -> list[dict[str, Any]]:
    """The containers of steps with images of their own, when only the images' names are known."""
    return [step_document(request, node, step, spec.unknown_image(own), context) for step, own in _with_images(request)]


def step_document(
    request: AttemptRequest, node: int, step: LaunchStep, image: spec.ImageFacts, context: spec.ContainerContext
) -> dict[str, Any]:
    """The container of a step with an image of its own, without its variables and its command.

    Our own code in there sees what it would see in the node's container. Other code sees the job's volumes, and where
    to leave what it fetches.
    """
    document = spec.container_document(request, node, image, context, writes=spec.OF_STEPS)
    document = {key: value for key, value in document.items() if key not in _OF_THE_NODE}
    host = {key: value for key, value in document["HostConfig"].items() if key not in _OF_ITS_HOST}
    if step.python:
        mounts = [mount for mount in host["Mounts"] if mount["Target"] != spec.SECRETS]
    else:
        volumes = {volume.target for volume in request.launch.volumes}
        mounts = [mount for mount in host["Mounts"] if mount["Target"] in volumes]
        mounts = [mount for mount in mounts if mount["Target"] not in step.outputs]
        for target, path in step.outputs.items():
            source = str(_prepared(node, context) / path)
            mounts.append({"Type": "bind", "Source": source, "Target": target, "ReadOnly": False})
        document |= {"Env": [], "WorkingDir": ""}
    return {**document, "HostConfig": {**host, "Mounts": mounts}}


def output_directories(request: AttemptRequest, node: int, context: spec.ContainerContext) -> list[Path]:
    """Where steps leave files for the ranks of their node; these directories must exist before they are mounted."""
    return [_prepared(node, context) / path for step in request.launch.steps for path in step.outputs.values()]


def _with_images(request: AttemptRequest) -> Iterator[tuple[LaunchStep, str]]:
    return ((step, step.image) for step in request.launch.steps if step.image is not None)


def _prepared(node: int, context: spec.ContainerContext) -> Path:
    return context.run_dir / "nodes" / str(node) / PREPARED


def _gang(name: str, document: dict[str, Any], gang: Gang | None) -> dict[str, Any]:
    if gang is None:
        return {"names": [name], "document": document}
    return {
        "names": [name, *(f"{name}-{index}" for index in range(gang.count))],
        "document": sized(document, gang.head),
        "gang": {"document": sized(document, gang.size), "argv": gang.argv},
    }


def sized(document: Mapping[str, Any], size: ContainerLimits) -> dict[str, Any]:
    """A container with these limits; where there is none, its own."""
    limits: dict[str, int] = {}
    if size.cpu_cores:
        limits["NanoCpus"] = round(size.cpu_cores * 1_000_000_000)
    if size.memory_bytes:
        limits["Memory"] = limits["MemorySwap"] = size.memory_bytes
    return {**document, "HostConfig": {**document["HostConfig"], **limits}}
