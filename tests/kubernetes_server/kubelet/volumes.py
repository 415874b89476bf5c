"""Volumes: folders of this machine that are mounted into the containers of a pod."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubernetes_server.kubelet.environment import (
    ContainerConfigError,
    config_map,
    expand,
    field_of,
    resource_of,
    secret,
)
from kubernetes_server.objects import Object
from kubernetes_server.store import Store


class VolumeError(Exception):
    """A volume can't be set up yet: its pod stays in ContainerCreating (event FailedMount)."""


class PodVolumes:
    def __init__(self, store: Store, pod: Object, folder: Path, memory: Path, token: Callable[[], str]) -> None:
        self._store = store
        self._pod = pod
        self._folder = folder
        self._memory = memory
        self._token = token
        self._paths: dict[str, Path] = {}

    def set_up(self) -> None:
        """A volume that no container mounts is not looked at.

        Raises:
            VolumeError: a ConfigMap, a Secret or a folder is missing.
        """
        spec = self._pod["spec"]
        containers = (*(spec.get("initContainers") or ()), *spec["containers"])
        mounted = {mount["name"] for each in containers for mount in each.get("volumeMounts") or ()}
        for volume in spec.get("volumes") or ():
            name = volume["name"]
            if name in self._paths or name not in mounted:
                continue
            try:
                self._paths[name] = self._make(volume)
                self._give_to_group(volume)
            except ContainerConfigError as error:
                raise VolumeError(f'MountVolume.SetUp failed for volume "{name}" : {error}') from error

    def mounts_of(self, container: Object, values: dict[str, str]) -> list[dict[str, Any]]:
        mounts = []
        for mount in container.get("volumeMounts") or ():
            source = self._paths[mount["name"]]
            below = mount.get("subPath") or expand(mount.get("subPathExpr") or "", values)
            if below:
                source = source / below
                if not source.exists():
                    source.mkdir(parents=True)
            volume = next(each for each in self._pod["spec"]["volumes"] if each["name"] == mount["name"])
            readonly = mount.get("readOnly", False) or _is_fixed(volume)
            mounts.append({"source": str(source), "target": mount["mountPath"], "readonly": readonly})
        # What is mounted below another mount comes after it.
        return sorted(mounts, key=lambda mount: mount["target"].count("/"))

    def _make(self, volume: Object) -> Path:
        name = volume["name"]
        folder: Path = self._folder / "volumes" / name
        if (host := volume.get("hostPath")) is not None:
            return self._host_path(name, host)
        if (empty := volume.get("emptyDir")) is not None:
            if empty.get("medium") == "Memory":
                folder = self._memory / self._pod["metadata"]["uid"] / name
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o777)
            return folder
        if (claim := volume.get("persistentVolumeClaim")) is not None:
            folder = self._folder.parent / "claims" / self._pod["metadata"]["namespace"] / claim["claimName"]
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        for kind in ("configMap", "secret", "downwardAPI", "projected"):
            if (source := volume.get(kind)) is not None:
                mode = source.get("defaultMode", 0o644)
                files = self._projected(source) if kind == "projected" else self._files(kind, source, mode)
                _write(folder, files)
                return folder
        raise VolumeError(f'volume "{name}" has a type that the test server does not have')

    def _give_to_group(self, volume: Object) -> None:
        """Let the fsGroup of the pod have a volume, unless it is a folder of the node."""
        group = (self._pod["spec"].get("securityContext") or {}).get("fsGroup")
        if group is None or "hostPath" in volume:
            return
        folder = self._paths[volume["name"]]
        more = 0o440 if _is_fixed(volume) else 0o660
        for path in (folder, *folder.rglob("*")):
            os.chown(path, -1, group)
            path.chmod(path.stat().st_mode | (0o2770 if path.is_dir() else more))

    def _host_path(self, name: str, host: Object) -> Path:
        path = Path(host["path"])
        kind = host.get("type")
        if kind == "DirectoryOrCreate":
            path.mkdir(parents=True, exist_ok=True)
        elif kind == "FileOrCreate":
            path.touch()
        elif not path.exists() and not kind:
            path.mkdir(parents=True)
        if (kind == "Directory" and not path.is_dir()) or not path.exists():
            raise VolumeError(
                f'MountVolume.SetUp failed for volume "{name}" : hostPath type check failed: {path} is not a directory'
            )
        return path

    def _files(self, kind: str, source: Object, mode: int) -> dict[str, tuple[bytes, int]]:
        namespace = self._pod["metadata"]["namespace"]
        optional = source.get("optional", False)
        if kind == "downwardAPI":
            return {item["path"]: (self._downward(item), item.get("mode", mode)) for item in source["items"]}
        if kind == "configMap":
            data = config_map(self._store, namespace, source["name"], optional)
        else:
            data = secret(self._store, namespace, source.get("secretName") or source["name"], optional)
        items = source.get("items")
        if not items:
            return {name: (content, mode) for name, content in data.items()}
        missing = [item["key"] for item in items if item["key"] not in data]
        if missing and not optional:
            name = source.get("secretName") or source["name"]
            raise ContainerConfigError(f'references non-existent {kind.lower()} key: {missing[0]} in "{name}"')
        return {item["path"]: (data[item["key"]], item.get("mode", mode)) for item in items if item["key"] in data}

    def _projected(self, volume: Object) -> dict[str, tuple[bytes, int]]:
        mode = volume.get("defaultMode", 0o644)
        files: dict[str, tuple[bytes, int]] = {}
        for source in volume.get("sources") or ():
            for kind, content in source.items():
                if kind == "serviceAccountToken":
                    files[content["path"]] = (self._token().encode(), mode)
                else:
                    files |= self._files(kind, content, mode)
        return files

    def _downward(self, item: Object) -> bytes:
        if reference := item.get("resourceFieldRef"):
            containers = self._pod["spec"]["containers"]
            wanted = reference.get("containerName")
            container = next(each for each in containers if wanted in (None, each["name"]))
            return resource_of(container, reference).encode()
        return field_of(self._pod, item["fieldRef"]["fieldPath"]).encode()


def _is_fixed(volume: Object) -> bool:
    return any(kind in volume for kind in ("configMap", "secret", "projected", "downwardAPI"))


def _write(folder: Path, files: dict[str, tuple[bytes, int]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, (content, file_mode) in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        path.chmod(file_mode)
