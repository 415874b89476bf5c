"""What the runtime is told of a container, and the /etc/hosts of its pod."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kubernetes_server.controllers.endpoints import DOMAIN
from kubernetes_server.kubelet.environment import command_of, environment_of, host_name
from kubernetes_server.kubelet.volumes import PodVolumes
from kubernetes_server.objects import Object
from kubernetes_server.quantities import quantity

if TYPE_CHECKING:
    from kubernetes_server.cluster import Cluster


def container_spec(
    cluster: Cluster, pod: Object, container: Object, folder: Path, volumes: PodVolumes
) -> dict[str, Any]:
    """
    Raises:
        ContainerConfigError: a ConfigMap, a Secret or a key in one is missing.
    """
    image = cluster.image(container["image"])
    base = {**image["environment"], **cluster.service_environment()}
    values = environment_of(cluster.store, pod, container, base)
    scratch = folder / "containers" / container["name"]
    scratch.mkdir(parents=True, exist_ok=True)
    hosts = {"source": str(folder / "hosts"), "target": "/etc/hosts"}
    limit = ((container.get("resources") or {}).get("limits") or {}).get("memory")
    security = {**(pod["spec"].get("securityContext") or {}), **(container.get("securityContext") or {})}
    return {
        "argv": command_of(container, image, values),
        "env": values,
        "cwd": container.get("workingDir") or image["folder"],
        "hostname": host_name(pod),
        "mounts": [hosts, *volumes.mounts_of(container, values)],
        "hidden": [*cluster.settings.hidden, *image["lacks"]],
        "scratch": str(scratch),
        "memory": int(quantity(limit)) if limit else 0,
        "uid": security.get("runAsUser"),
        "gid": security.get("runAsGroup", security.get("runAsUser")),
        "groups": [*([security["fsGroup"]] if "fsGroup" in security else []), *security.get("supplementalGroups", ())],
    }


def write_hosts(folder: Path, pod: Object, address: str, services: list[str]) -> None:
    """In place, since the file is mounted."""
    spec, name = pod["spec"], host_name(pod)
    subdomain, namespace = spec.get("subdomain"), pod["metadata"]["namespace"]
    own = f"{name}.{subdomain}.{namespace}.{DOMAIN} {name}" if subdomain else name
    aliases = [f"{each['ip']}\t{' '.join(each['hostnames'])}" for each in spec.get("hostAliases") or ()]
    lines = ["127.0.0.1\tlocalhost", f"{address}\t{own}", *aliases, *services, ""]
    content = "\n".join(lines).encode()
    descriptor = os.open(folder / "hosts", os.O_CREAT | os.O_WRONLY, 0o644)
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))
    os.close(descriptor)
