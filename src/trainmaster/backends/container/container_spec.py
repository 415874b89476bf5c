"""From an attempt to its containers: plain documents of the engine's API, one for each node. Pure."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.protocol.environment import WORKSPACE
from trainmaster.protocol.launch import Lifetime, VolumeMount
from trainmaster.protocol.request import CONFINED_CACHES, AttemptRequest, ContainerOverrides
from trainmaster.protocol.run_directory import PREPARED

LABEL = "trainmaster."
RUNS, JOB, ATTEMPT, NODE, NODES, RUN_DIR, KEEP, PORT, PROBED_AT = (
    f"{LABEL}{name}" for name in ("runs", "job", "attempt", "node", "nodes", "run-dir", "keep", "port", "probed-at")
)

PROBE_PREFIX = "tm-probe-"
INSIDE = "/trainmaster"
"""Where our own files are mounted that keep no path from outside."""
WORKER = f"{INSIDE}/worker.pyz"
SECRETS = f"{INSIDE}/secrets"
SECRETS_FILE = "values.json"
OF_WORKERS, OF_CLAIMED, OF_STEPS, OF_RANKS = (
    ("claims", "nodes/{node}"),
    ("nodes/{node}",),
    ("nodes/{node}/prepared",),
    (),
)
"""Which part of the run directory a container writes to, besides work/: a container with a worker in it; one whose
worker continues from another outside, whose claim names a process of the machine; a step, and a rank, of a worker
outside. The worker outside writes to the node's directory itself, with its rights outside, so nobody may put
links there."""
CDI_KIND = "nvidia.com/gpu"
LOOPBACK = "127.0.0.1"
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETGID", "SETUID")
"""What root in a container may do: enough to install packages and start servers, and not the rest of the engines'
default, such as making devices, forging packets and changing roots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """What is known of an image before anything runs in it."""

    id: str
    environment: Mapping[str, str]
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    """The image's arguments for it, or its command if it has no entry point."""
    working_directory: str | None
    python: str | None
    """The interpreter that runs the worker; None: the worker stays outside."""
    lacks: str = ""
    """Why there is none."""


def unknown_image(name: str) -> ImageFacts:
    return ImageFacts(id=name, environment={}, entrypoint=(), command=(), working_directory=None, python="python3")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerContext:
    """What all containers of a server have in common."""

    runs: Path
    """Contains all run directories; also labels the containers of this server."""
    run_dir: Path
    worker: Path
    secrets: Path
    """Contains a directory in memory for each container."""
    user: str
    """The user that the worker runs as inside, as `uid:gid`."""
    machine_memory_mb: int
    passes_gpus: bool
    """Whether the GPUs are real, and are passed on by their CDI names."""
    port: int | None = None
    """For a service: where it listens, published on this machine's loopback address."""


def container_name(request: AttemptRequest, node: int) -> str:
    return f"tm-{request.attempt_id}-{node}"


def network_name(request: AttemptRequest) -> str | None:
    """The name of the attempt's own network; None if it uses the default network.

    That one is for jobs of the server's own user: containers there can reach each other.
    """
    own = len(request.nodes) > 1 or request.launch.lifetime is Lifetime.SERVICE or request.confined
    return f"tm-{request.attempt_id}" if own else None


def network_document(request: AttemptRequest, context: ContainerContext) -> dict[str, Any]:
    labels = _labels(request, context)
    # podman isolates networks from one another only with this option; docker always does.
    options = {"isolate": "true"}
    name = network_name(request)
    return {"Name": name, "Driver": "bridge", "CheckDuplicate": True, "Labels": labels, "Options": options}


def outside_document(
    request: AttemptRequest, node: int, image: ImageFacts, context: ContainerContext
) -> dict[str, Any]:
    """The container of a rank of a worker outside, without its command, its variables and its streams."""
    document = container_document(request, node, image, context, writes=OF_RANKS)
    del document["Entrypoint"], document["Cmd"]
    host = document["HostConfig"]
    mounts = [mount for mount in host["Mounts"] if mount["Target"] not in (WORKER, SECRETS)]
    directory = request.launch.working_directory
    if directory is None and request.launch.steps[-1].argv:
        directory = str(context.run_dir / "work")
    return {**document, "Env": [], "WorkingDir": directory or "", "HostConfig": {**host, "Mounts": mounts}}


def within_container(
    request: AttemptRequest, node: int, image: ImageFacts, context: ContainerContext
) -> ContainerOverrides:
    """What differs in a node's container."""
    gpus, steps = request.nodes[node].gpus, request.launch.steps
    # Inside, whole GPUs are numbered from 0, and slices keep their names.
    numbered = tuple(str(index) if gpu.isdecimal() else gpu for index, gpu in enumerate(gpus))
    return ContainerOverrides(
        address=f"node-{node}" if network_name(request) else None,
        port=context.port,
        gpus=numbered if gpus and context.passes_gpus else None,
        entrypoint=image.entrypoint,
        command=image.command,
        working_directory=image.working_directory,
        # Steps with images of their own come first, and are done when the node's container starts.
        first_step=next(step.name for step in steps if not step.image) if steps[0].image else None,
    )


def container_document(
    request: AttemptRequest,
    node: int,
    image: ImageFacts,
    context: ContainerContext,
    *,
    writes: Sequence[str] = OF_WORKERS,
) -> dict[str, Any]:
    """The document that creates the container of one node; `writes` is its part of the run directory."""
    launch, assigned = request.launch, request.nodes[node]
    network = network_name(request)
    name = container_name(request, node)
    host: dict[str, Any] = {
        "NetworkMode": network or "bridge",
        "Mounts": [
            _bind(str(context.worker), WORKER, read_only=True),
            _bind(str(context.secrets / name), SECRETS),
            *_own_mounts(request, node, context, writes),
            *_workspace_mounts(request, node, context),
            *(_mounted(volume, request) for volume in launch.volumes),
        ],
        "CapDrop": ["ALL"],
        "CapAdd": list(CAPABILITIES),
        # With SELinux, containers could not read their mounts otherwise.
        "SecurityOpt": ["label=disable", "no-new-privileges"],
        # The engines' default of 64 MiB is too small for the workers of a data loader.
        "ShmSize": (launch.container.shm_mb or assigned.memory_mb or context.machine_memory_mb // 2) << 20,
    }
    if launch.container.pids:
        host["PidsLimit"] = launch.container.pids
    if assigned.cpu_cores:
        host["NanoCpus"] = assigned.cpu_cores * 1_000_000_000
    if assigned.memory_mb:
        host["Memory"] = host["MemorySwap"] = assigned.memory_mb << 20
    if assigned.gpus and context.passes_gpus:
        host["DeviceRequests"] = [{"Driver": "cdi", "DeviceIDs": [f"{CDI_KIND}={gpu}" for gpu in assigned.gpus]}]
    if context.port is not None:
        # The same port on both sides: a worker outside probes the same address as one inside.
        host["PortBindings"] = {f"{context.port}/tcp": [{"HostIp": LOOPBACK, "HostPort": str(context.port)}]}
    within = within_container(request, node, image, context)
    document: dict[str, Any] = {
        "Image": image.id,
        "Entrypoint": [image.python, WORKER],
        "Cmd": [
            "run",
            *("--run-dir", str(context.run_dir), "--node", str(node)),
            *("--secrets", f"{SECRETS}/{SECRETS_FILE}", "--within", json.dumps(within.to_json())),
        ],
        "Env": [f"PYTHONPATH={':'.join(filter(None, (image.environment.get('PYTHONPATH'), WORKER)))}"],
        "User": context.user,
        "WorkingDir": "/",
        "Labels": _labels(request, context, node),
        "HostConfig": host,
    }
    if context.port is not None:
        document["ExposedPorts"] = {f"{context.port}/tcp": {}}
    if network:
        document["Hostname"] = f"node-{node}"
        document["NetworkingConfig"] = {"EndpointsConfig": {network: {"Aliases": [f"node-{node}"]}}}
    return document


def writable_directories(
    request: AttemptRequest, node: int, context: ContainerContext, writes: Sequence[str] = OF_WORKERS
) -> list[str]:
    """What a node writes to, at the same paths inside and outside. All of it must exist before it is mounted."""
    parts = [str(context.run_dir / part.format(node=node)) for part in (*writes, "work")]
    return [*parts, request.checkpoint_dir, request.output_dir, *([request.cache_dir] if request.cache_dir else [])]


def prepared_directories(request: AttemptRequest, node: int, context: ContainerContext) -> dict[str, str]:
    """Where preparing steps leave files, by their path below /workspace. They must exist before they are mounted."""
    home = context.run_dir / "nodes" / str(node) / PREPARED
    return {path: str(home / path) for path in request.launch.prepared.values()}


def volume_name(volume: VolumeMount, request: AttemptRequest) -> str:
    """The engine's name of a volume: each account of each server has its own."""
    # The name from before confined accounts had their own directories: named volumes stay.
    account = (request.cache_dir or "").replace(f"/{CONFINED_CACHES}/", "/")
    owner = hashlib.sha256(account.encode()).hexdigest()[:12]
    return f"trainmaster-{owner}-{volume.source}"


def _labels(request: AttemptRequest, context: ContainerContext, node: int | None = None) -> dict[str, str]:
    labels = {
        RUNS: str(context.runs),
        JOB: request.job_id,
        ATTEMPT: request.attempt_id,
        NODES: str(len(request.nodes)),
        RUN_DIR: str(context.run_dir),
    }
    if node is not None:
        labels[NODE] = str(node)
        # Set in either case: the image may have labels of its own.
        labels[KEEP] = "no" if request.launch.container.auto_remove else "yes"
        labels[PORT] = str(context.port or "")
    return labels


def _own_mounts(
    request: AttemptRequest, node: int, context: ContainerContext, writes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The job's own directories.

    The server reads back what it wrote for the job: the request, and who owns the job. So a container can write only to
    its own part of the attempts' files.
    """
    job = str(context.run_dir.parent)
    yield _bind(job, job, read_only=True)
    writable = writable_directories(request, node, context, writes)
    for directory in writable:
        yield _bind(directory, directory)
    for path in (request.blob_dir if request.launch.blobs else None, _home_of_checkpoint(request)):
        if path and path not in writable:
            yield _bind(path, path, read_only=True)


def _workspace_mounts(request: AttemptRequest, node: int, context: ContainerContext) -> Iterator[dict[str, Any]]:
    """Fetched files, where programs for Kubeflow look for them, unless a volume of the job is there."""
    taken = {volume.target.rstrip("/") for volume in request.launch.volumes}
    for path, directory in prepared_directories(request, node, context).items():
        if f"{WORKSPACE}/{path}" not in taken:
            yield _bind(directory, f"{WORKSPACE}/{path}")


def _home_of_checkpoint(request: AttemptRequest) -> str | None:
    """The checkpoint directory of the job whose checkpoint is resumed from; None if it is not on our disk.

    Not the checkpoint itself: that job may have put a link in its place, and the engine would follow it.
    """
    artifacts = Path(request.output_dir).parents[1]
    if request.resume_from is None or not Path(request.resume_from).is_relative_to(artifacts):
        return None
    return str(artifacts.joinpath(*Path(request.resume_from).relative_to(artifacts).parts[:2]))


def _mounted(volume: VolumeMount, request: AttemptRequest) -> dict[str, Any]:
    if os.path.isabs(volume.source):
        return _bind(volume.source, volume.target, read_only=volume.read_only)
    named = {"Type": "volume", "Source": volume_name(volume, request), "Target": volume.target}
    return {**named, "ReadOnly": volume.read_only}


def _bind(source: str, target: str, *, read_only: bool = False) -> dict[str, Any]:
    bind = {"Type": "bind", "Source": source, "Target": target, "ReadOnly": read_only}
    # Nested mounts would come along, and would be writable. podman treats `NonRecursive: false` as true.
    return {**bind, "BindOptions": {"NonRecursive": True}} if read_only else bind


CREATE = "/v4.0.0/libpod/containers/create"
_CPU_PERIOD_US = 100_000


def libpod_from(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """A container of ours as podman's own API takes it.

    podman accepts docker's API, but silently ignores devices with CDI names there. So a container with GPUs is created
    through its own API.
    """
    host = document["HostConfig"]
    limits: dict[str, Any] = {}
    if "Memory" in host:
        limits["memory"] = {"limit": host["Memory"], "swap": host["MemorySwap"]}
    if "NanoCpus" in host:
        limits["cpu"] = {"period": _CPU_PERIOD_US, "quota": host["NanoCpus"] * _CPU_PERIOD_US // 1_000_000_000}
    if "PidsLimit" in host:
        limits["pids"] = {"limit": host["PidsLimit"]}
    endpoints = document.get("NetworkingConfig", {}).get("EndpointsConfig", {})
    ports = [
        {
            "container_port": int(port.removesuffix("/tcp")),
            "host_ip": each["HostIp"],
            "host_port": int(each["HostPort"]),
        }
        for port, published in host.get("PortBindings", {}).items()
        for each in published
    ]
    mounts = [mount for mount in host["Mounts"] if mount["Type"] == "bind"]
    volumes = [mount for mount in host["Mounts"] if mount["Type"] == "volume"]
    return {
        "name": name,
        "image": document["Image"],
        "entrypoint": document["Entrypoint"],
        "command": document["Cmd"],
        "env": dict(line.partition("=")[::2] for line in document["Env"]),
        "user": document["User"],
        "work_dir": document["WorkingDir"],
        "labels": document["Labels"],
        "mounts": [
            {
                "type": "bind",
                "source": mount["Source"],
                "destination": mount["Target"],
                "options": ["bind" if mount["ReadOnly"] else "rbind", _mode(mount)],
            }
            for mount in mounts
        ],
        "volumes": [{"Name": mount["Source"], "Dest": mount["Target"], "Options": [_mode(mount)]} for mount in volumes],
        "selinux_opts": ["disable"],
        "no_new_privileges": "no-new-privileges" in host["SecurityOpt"],
        "cap_drop": host["CapDrop"],
        "cap_add": host["CapAdd"],
        "portmappings": ports,
        "shm_size": host["ShmSize"],
        "resource_limits": limits,
        "devices": [{"path": device} for wish in host["DeviceRequests"] for device in wish["DeviceIDs"]],
        "netns": {"nsmode": "bridge"},
        **({"hostname": document["Hostname"]} if "Hostname" in document else {}),
        **({"Networks": {each: {"aliases": told["Aliases"]} for each, told in endpoints.items()}} if endpoints else {}),
    }


def _mode(mount: Mapping[str, Any]) -> str:
    return "ro" if mount["ReadOnly"] else "rw"
