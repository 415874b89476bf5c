"""From an attempt to the containers that run it: plain documents of the engine's API, one for each node. Pure."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.protocol.launch import Lifetime, Volume
from trainmaster.protocol.request import AttemptRequest, Within

LABEL = "trainmaster."
"""Begins the name of every label of ours."""
RUNS, JOB, ATTEMPT, NODE, NODES, RUN_DIR, KEEP, PROBED_AT = (
    f"{LABEL}{name}" for name in ("runs", "job", "attempt", "node", "nodes", "run-dir", "keep", "probed-at")
)

PROBE_PREFIX = "tm-probe-"
"""Begins the name of a container that only looks into an image."""
INSIDE = "/trainmaster"
"""Where a container has what is ours and has no path of its own."""
WORKER = f"{INSIDE}/worker.pyz"
SECRETS = f"{INSIDE}/secrets"
SECRETS_FILE = "values.json"
CDI_KIND = "nvidia.com/gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """What is known of an image before anything runs in it."""

    id: str
    environment: Mapping[str, str]
    command: tuple[str, ...]
    """What it runs when it is not told what to run."""
    working_directory: str | None
    """Where it runs that."""
    python: str | None
    """The interpreter in it that runs the worker; None: the worker stays outside."""
    lacks: str = ""
    """Why that is so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all containers of a server have in common."""

    runs: Path
    """Below which all run directories lie; containers are ours by it."""
    run_dir: Path
    worker: Path
    """The worker's archive, on this machine."""
    secrets: Path
    """Below which each container has a directory in memory."""
    user: str
    """As whom the worker runs in there, as numbers."""
    machine_memory_mb: int
    passes_gpus: bool
    """Whether the GPUs of this machine are real, and are handed on by their CDI names."""


def container_name(request: AttemptRequest, node: int) -> str:
    """The name of a node's container."""
    return f"tm-{request.attempt_id}-{node}"


def network_name(request: AttemptRequest) -> str | None:
    """The name of the attempt's own network; None where its nodes need none."""
    if len(request.nodes) == 1 or request.launch.lifetime is Lifetime.SERVICE:
        return None
    return f"tm-{request.attempt_id}"


def network_document(request: AttemptRequest, around: Surroundings) -> dict[str, Any]:
    """The attempt's own network."""
    labels = _labels(request, around)
    return {"Name": network_name(request), "Driver": "bridge", "CheckDuplicate": True, "Labels": labels}


def outside_document(request: AttemptRequest, node: int, image: ImageFacts, around: Surroundings) -> dict[str, Any]:
    """The container of a rank of a worker that stays outside, but for its command and its variables."""
    document = container_document(request, node, image, around)
    del document["Entrypoint"], document["Cmd"]
    host = document["HostConfig"]
    mounts = [mount for mount in host["Mounts"] if not mount["Target"].startswith(f"{INSIDE}/")]
    directory = request.launch.working_directory
    if directory is None and request.launch.steps[-1].argv:
        directory = str(around.run_dir / "work")
    return {**document, "Env": [], "WorkingDir": directory or "", "HostConfig": {**host, "Mounts": mounts}}


def within_container(request: AttemptRequest, node: int, image: ImageFacts, around: Surroundings) -> Within:
    """What is different in a node's container."""
    gpus = request.nodes[node].gpus
    return Within(
        address=f"node-{node}" if network_name(request) else None,
        gpus=_numbered(gpus) if gpus and around.passes_gpus else None,
        command=image.command,
        working_directory=image.working_directory,
    )


def container_document(request: AttemptRequest, node: int, image: ImageFacts, around: Surroundings) -> dict[str, Any]:
    """The container of one node, as the engine is asked to create it."""
    launch, assigned = request.launch, request.nodes[node]
    network = network_name(request)
    name = container_name(request, node)
    # A service is reached by the server on the machine's own loopback address.
    mode = network or ("host" if launch.lifetime is Lifetime.SERVICE else "bridge")
    host: dict[str, Any] = {
        "NetworkMode": mode,
        "Mounts": [
            _bind(str(around.worker), WORKER, read_only=True),
            _bind(str(around.secrets / name), SECRETS),
            *_own_mounts(request, around),
            *(_mounted(volume, request) for volume in launch.volumes),
        ],
        # Where SELinux is on, containers could not read what is mounted into them.
        "SecurityOpt": ["label=disable"],
        "ShmSize": _shm_mb(request, node, around) << 20,
    }
    if launch.container.pids:
        host["PidsLimit"] = launch.container.pids
    if assigned.cpu_cores:
        host["NanoCpus"] = assigned.cpu_cores * 1_000_000_000
    if assigned.memory_mb:
        host["Memory"] = host["MemorySwap"] = assigned.memory_mb << 20
    if assigned.gpus and around.passes_gpus:
        devices = [f"{CDI_KIND}={gpu}" for gpu in assigned.gpus]
        host["DeviceRequests"] = [{"Driver": "cdi", "DeviceIDs": devices}]
    within = within_container(request, node, image, around)
    document: dict[str, Any] = {
        "Image": image.id,
        "Entrypoint": [image.python, WORKER],
        "Cmd": [
            "run",
            *("--run-dir", str(around.run_dir), "--node", str(node)),
            *("--secrets", f"{SECRETS}/{SECRETS_FILE}", "--within", json.dumps(within.to_json())),
        ],
        "Env": [f"PYTHONPATH={_python_path(image)}"],
        "User": around.user,
        "WorkingDir": "/",
        "Labels": _labels(request, around, node),
        "HostConfig": host,
    }
    if network:
        document["Hostname"] = f"node-{node}"
        document["NetworkingConfig"] = {"EndpointsConfig": {network: {"Aliases": [f"node-{node}"]}}}
    return document


def own_directories(request: AttemptRequest, around: Surroundings) -> list[str]:
    """What a node writes to, at the same paths inside and outside; it all has to be there before it is mounted."""
    # The whole job's, because the file that says which attempt owns it is replaced there.
    found = [str(around.run_dir.parent), request.checkpoint_dir, request.output_dir]
    return [*found, *([request.cache_dir] if request.cache_dir else [])]


def volume_name(volume: Volume, request: AttemptRequest) -> str:
    """The engine's name of a volume: each account of each server has its own."""
    owner = hashlib.sha256((request.cache_dir or "").encode()).hexdigest()[:12]
    return f"trainmaster-{owner}-{volume.source}"


def _labels(request: AttemptRequest, around: Surroundings, node: int | None = None) -> dict[str, str]:
    labels = {
        RUNS: str(around.runs),
        JOB: request.job_id,
        ATTEMPT: request.attempt_id,
        NODES: str(len(request.nodes)),
        RUN_DIR: str(around.run_dir),
    }
    if node is not None:
        labels[NODE] = str(node)
        # Said in either case: the image may have labels of its own.
        labels[KEEP] = "no" if request.launch.container.auto_remove else "yes"
    return labels


def _own_mounts(request: AttemptRequest, around: Surroundings) -> Iterator[dict[str, Any]]:
    writable = own_directories(request, around)
    for directory in writable:
        yield _bind(directory, directory)
    for path in (request.blob_dir if request.launch.blobs else None, request.resume_from):
        # A checkpoint may lie with another job, or in an object store.
        if path and os.path.isabs(path) and not any(Path(path).is_relative_to(above) for above in writable):
            yield _bind(path, path, read_only=True)


def _mounted(volume: Volume, request: AttemptRequest) -> dict[str, Any]:
    if os.path.isabs(volume.source):
        return _bind(volume.source, volume.target, read_only=volume.read_only)
    named = {"Type": "volume", "Source": volume_name(volume, request), "Target": volume.target}
    return {**named, "ReadOnly": volume.read_only}


def _bind(source: str, target: str, *, read_only: bool = False) -> dict[str, Any]:
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": read_only}


def _shm_mb(request: AttemptRequest, node: int, around: Surroundings) -> int:
    """How much /dev/shm may hold: 64 MiB, as engines have it, are too few for the workers of a data loader."""
    wish = request.launch.container.shm_mb
    return wish or request.nodes[node].memory_mb or around.machine_memory_mb // 2


def _numbered(gpus: tuple[str, ...]) -> tuple[str, ...]:
    """GPUs as they are called inside: whole ones are counted anew, slices keep the names that they have."""
    return tuple(str(index) if gpu.isdecimal() else gpu for index, gpu in enumerate(gpus))


def _python_path(image: ImageFacts) -> str:
    return ":".join(filter(None, (image.environment.get("PYTHONPATH"), WORKER)))
