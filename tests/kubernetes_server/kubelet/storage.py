"""Whether a pod writes more to the disk of its node than it may."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kubernetes_server.objects import Object
from kubernetes_server.quantities import quantity


def excess(pod: Object, volumes: Path, logs: Path) -> str:
    """Why the kubelet evicts a pod, in its words; empty: it is within its limits.

    What containers write outside of volumes is not counted: their root is that of this machine.
    """
    spec = pod["spec"]
    total = _size(logs)
    for volume in spec.get("volumes") or ():
        empty = volume.get("emptyDir")
        if empty is None or empty.get("medium") == "Memory":
            continue
        used = _size(volumes / volume["name"])
        if (limit := empty.get("sizeLimit")) is not None and used > quantity(limit):
            return f'Usage of EmptyDir volume "{volume["name"]}" exceeds the limit "{limit}". '
        total += used
    limits = _limits(pod)
    if limits and total > sum(quantity(limit) for limit in limits):
        limit = limits[0] if len(limits) == 1 else str(sum(quantity(each) for each in limits))
        return f"Pod ephemeral local storage usage exceeds the total limit of containers {limit}. "
    return ""


def has_limits(pod: Object) -> bool:
    volumes = (volume.get("emptyDir") or {} for volume in pod["spec"].get("volumes") or ())
    return bool(_limits(pod)) or any("sizeLimit" in each and each.get("medium") != "Memory" for each in volumes)


def _limits(pod: Object) -> list[str]:
    resources = (each.get("resources") or {} for each in pod["spec"]["containers"])
    limits = ((each.get("limits") or {}).get("ephemeral-storage") for each in resources)
    return [str(limit) for limit in limits if limit is not None]


def _size(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):  # it was removed meanwhile
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total
