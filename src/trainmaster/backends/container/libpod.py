"""A container in the words of podman's own API.

Podman answers docker's API too, but takes no devices by their CDI names there: it leaves them out without a word. So
a container that gets GPUs is created by podman's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CREATE = "/v4.0.0/libpod/containers/create"
_CPU_PERIOD_US = 100_000


def libpod_from(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """The container of a document of docker's API, as far as `container_spec` writes such."""
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
