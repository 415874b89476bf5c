"""What the dashboard is sent: the submission of the driver, and the packages that the driver reads. Pure."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shlex
import zlib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from trainmaster.backends.cluster.engine import EngineLaunch, engine_prefix
from trainmaster.backends.ray.options import RayOptions
from trainmaster.protocol.request import EngineNeeds
from trainmaster.server.core.resources import REGION

NO_PACKAGE, NO_RAY = 75, 76
"""Exit codes of a driver that cannot begin. `states` says what they mean."""
INSTANCE, VERSION = "trainmaster_instance", "trainmaster_version"
"""Keys of a driver's metadata."""
NODE_VARIABLE = "TRAINMASTER_NODE"
REGION_LABEL = "ray.io/availability-region"
ACCELERATOR = "accelerator_type:"

LOST_GRACE_S = 10
"""What a worker gets between SIGTERM and SIGKILL when the Ray processes that it belongs to are gone."""

_MARK = 0.001
"""How much a bundle takes of a resource that only says where it may run."""
GPU_MEMORY_MB: Mapping[str, int] = {
    "T4": 16 << 10,
    "P100": 16 << 10,
    "V100": 16 << 10,
    "L4": 24 << 10,
    "A10G": 24 << 10,
    "A100-40G": 40 << 10,
    "A100": 40 << 10,
    "L40S": 48 << 10,
    "A100-80G": 80 << 10,
    "H100": 80 << 10,
    "RTX-PRO-6000": 96 << 10,
    "H20": 96 << 10,
    "H200": 141 << 10,
    "B200": 180 << 10,
    "GB200": 180 << 10,
    "B300": 270 << 10,
    "GB300": 270 << 10,
}
"""Ray's names of accelerators -> the least memory that they come with."""

LOADER = f"""
import json, sys, zlib
try:
    import ray
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get
except ImportError as error:
    sys.stderr.write("trainmaster: %s\\n" % error)
    sys.exit({NO_RAY})
ray.init(namespace=sys.argv[2], log_to_driver=False, logging_level=40)
package = _internal_kv_get(sys.argv[1])
if package is None:
    sys.exit({NO_PACKAGE})
_internal_kv_del(sys.argv[1])
given = json.loads(zlib.decompress(package))
exec(given.pop("actor"))
exec(given.pop("driver"))
"""
"""The program of the driver's job: it takes the package with the rest out of the cluster's store."""

FINDS_PYTHON = (
    # The shell's parent is a process of Ray, into which the library of Ray is mapped.
    r"python=$(sed -n 's#^[^/]*\(/.*\)/ray/_raylet[^/]*\.so.*#\1/../../../bin/python3#p' /proc/$PPID/maps | head -n 1)"
    '; [ -x "$python" ] || python=python3; '
)
"""Has the shell find the Python that Ray is installed for."""


def namespace(instance: str, options: RayOptions) -> str:
    return options.namespace or f"trainmaster-{instance}"


def driver_document(instance: str) -> str:
    """The file among Ray's logs in which the drivers of a Trainmaster write down what they know."""
    return f"trainmaster-{instance}.json"


def package_name(name: str, request: str = "") -> str:
    """Of a launch, or of another request about an attempt; of the form that Ray's packages of the protocol gcs have."""
    return f"{name}.{request}.zip" if request else f"{name}.zip"


def driver_submission(name: str, instance: str, options: RayOptions) -> dict[str, Any]:
    """The body of `POST /api/jobs/`. Listings show all of it to everybody, so it has no secrets. Each has a name of its
    own: Ray does not free one at once."""
    words = shlex.join(("-c", LOADER, f"gcs://{package_name(name)}", namespace(instance, options)))
    given = options.driver_python
    start = f"exec {shlex.quote(given)}" if given else f'{FINDS_PYTHON}exec "$python"'
    return {
        "submission_id": name,
        "entrypoint": f"{start} {words}",
        "metadata": {"job_name": "Trainmaster", INSTANCE: instance, VERSION: driver_version(instance, options)},
    }


def driver_package(instance: str, options: RayOptions) -> bytes:
    content = {**_driver(instance, options), "version": driver_version(instance, options)}
    return zlib.compress(json.dumps(content).encode())


def driver_version(instance: str, options: RayOptions) -> str:
    """Differs when another version of Trainmaster, or other options, want another driver."""
    content = json.dumps([_driver(instance, options), options.driver_python])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _driver(instance: str, options: RayOptions) -> dict[str, str]:
    return {
        "mailbox": f"gcs://{engine_prefix(instance)}",
        "namespace": namespace(instance, options),
        "document": driver_document(instance),
        "actor": _source("actor.py"),
        "driver": _source("driver.py"),
        "keeper": _source("keeper.py"),
    }


def plan(launch: EngineLaunch, options: RayOptions) -> dict[str, Any]:
    """What the driver does, without the secrets."""
    return {
        "attempt": launch.request.attempt_id,
        "nodes": launch.node_count,
        "strategy": options.placement.value if launch.node_count > 1 else "PACK",
        "bundle": bundle(launch.needs, options),
        "labels": labels(launch.needs),
        "accelerators": accelerators(launch.needs),
        "grace_s": launch.grace_s,
        "lost_grace_s": min(LOST_GRACE_S, launch.grace_s),
        "node_variable": NODE_VARIABLE,
        "command": list(launch.command),
        "environment": dict(launch.environment),
    }


def package(launch: EngineLaunch, options: RayOptions) -> bytes:
    """What the driver reads, with the secrets."""
    return zlib.compress(json.dumps({**plan(launch, options), "secrets": dict(launch.secrets)}).encode())


def document(launch: EngineLaunch, options: RayOptions) -> str:
    secrets = dict.fromkeys(launch.secrets, "(hidden)")
    content = {"package": package_name(launch.name), "launch": {**plan(launch, options), "secrets": secrets}}
    return json.dumps(content, indent=2) + "\n"


def bundle(needs: EngineNeeds, options: RayOptions) -> dict[str, float]:
    """What each node of the attempt takes. Ray knows no priorities: those have an effect in Trainmaster's queues alone.
    It cannot choose nodes by their disks, nor by labels that it may ignore: jobs that want that are refused."""
    wanted = {"CPU": 1.0, **options.resources}
    if needs.cpu_cores:
        wanted["CPU"] = float(needs.cpu_cores)
    if needs.gpus:
        wanted["GPU"] = float(needs.gpus)
    if needs.memory_mb:
        wanted["memory"] = float(needs.memory_mb << 20)
    for capability in needs.capabilities:
        if "=" not in capability:
            wanted.setdefault(capability, _MARK)
    return {name: amount for name, amount in wanted.items() if amount > 0}


def labels(needs: EngineNeeds) -> dict[str, str]:
    """Capabilities of the form `key=value` are labels of Ray's nodes."""
    chosen = {}
    for capability in needs.capabilities:
        key, separator, value = capability.partition("=")
        if separator:
            chosen[REGION_LABEL if capability.startswith(REGION) else key] = value
    return chosen


def accelerators(needs: EngineNeeds) -> list[str]:
    """Ray's names of the GPUs that would do, the most fitting first: the driver takes the first that the cluster has,
    else the last. Empty: any would.

    >>> from functools import partial
    >>> needs = partial(EngineNeeds, account="a", job_name="j", gpus=1)
    >>> accelerators(needs(gpu_type="NVIDIA_H100_80GB")), accelerators(needs(gpu_type="A100-80GB"))
    (['H100'], ['A100-80G', 'A100'])
    >>> accelerators(needs(gpu_type="H200-141GB")), accelerators(needs(gpu_type="A100", gpu_memory_min_mb=50_000))
    (['H200'], ['A100-80G'])
    >>> accelerators(needs(gpu_type="MI300X")), accelerators(needs(gpu_memory_min_mb=200_000))
    (['MI300X'], ['B300', 'GB300'])
    """
    if not needs.gpus or not (needs.gpu_type or needs.gpu_memory_min_mb):
        return []
    enough = sorted(
        (name for name, size_mb in GPU_MEMORY_MB.items() if size_mb >= needs.gpu_memory_min_mb),
        key=lambda name: GPU_MEMORY_MB[name],
    )
    if not needs.gpu_type:
        return enough or [f"at-least-{needs.gpu_memory_min_mb}-MB"]
    want = words(needs.gpu_type)
    # A user's name often has the size, and Ray's seldom does.
    unsized = {word for word in want if not _SIZE.fullmatch(word)}
    exact = [name for name in enough if words(name) == want]
    wider = [name for name in GPU_MEMORY_MB if words(name) == unsized != want]
    if exact or wider:
        return [*exact, *wider]
    return [name for name in enough if words(name) > want] or [needs.gpu_type]


_SIZE = re.compile(r"\d+g")


def words(name: str) -> frozenset[str]:
    """What makes up the name of an accelerator, without the maker's.

    >>> sorted(words("NVIDIA_A100_80GB"))
    ['80g', 'a100']
    """
    found = re.findall(r"[a-z0-9.]+", name.lower())
    return frozenset(re.sub(r"^(\d+)gb$", r"\1g", word) for word in found) - {"nvidia", "tesla"}


@functools.cache
def _source(file: str) -> str:
    return resources.files("trainmaster.backends.ray").joinpath(file).read_text(encoding="utf-8")
