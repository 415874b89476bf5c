"""Strategic merges of pod templates: what an operator adds to every pod of a cluster. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WORKER = "worker"
"""The container that a job runs in."""

_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""Lists whose entries are merged by a key; other lists are replaced."""
_DIRECTIVE = "$patch"


def merged(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """A document with an overlay: mappings are merged, and what is null is removed.

    >>> merged({"a": 1, "volumes": [{"name": "x", "y": 1}]}, {"a": None, "volumes": [{"name": "x", "z": 2}]})
    {'volumes': [{'name': 'x', 'y': 1, 'z': 2}]}
    """
    result = dict(base)
    for name, value in overlay.items():
        old = result.get(name)
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            result[name] = merged(old if isinstance(old, Mapping) else {}, value)
        elif name in _KEYS and isinstance(value, Sequence):
            result[name] = _merged_list(old or [], value, _KEYS[name])
        else:
            result[name] = value
    return result


def _merged_list(base: Sequence[Any], overlay: Sequence[Any], key: str) -> list[Any]:
    result = list(base)
    for entry in overlay:
        there = next((i for i, old in enumerate(result) if old.get(key) == entry.get(key)), None)
        if entry.get(_DIRECTIVE) == "delete":
            if there is not None:
                del result[there]
        elif there is None:
            result.append(merged({}, entry))
        else:
            result[there] = merged(result[there], entry)
    return result


def check_overlay(overlay: Mapping[str, Any]) -> None:
    """Raises ValueError if an overlay is no pod template, or changes what Trainmaster relies on."""
    if not isinstance(overlay, Mapping) or overlay.keys() - {"metadata", "spec"}:
        raise ValueError("it has `metadata` and `spec`, as the template of a pod, and nothing else")
    metadata, spec = overlay.get("metadata") or {}, overlay.get("spec") or {}
    if not isinstance(metadata, Mapping) or metadata.keys() - {"labels", "annotations"}:
        raise ValueError("metadata: it has `labels` and `annotations`")
    if not isinstance(spec, Mapping):
        raise ValueError("spec: it is a mapping")
    for name in ("restartPolicy", "subdomain", "hostname", "activeDeadlineSeconds", "terminationGracePeriodSeconds"):
        if name in spec:
            raise ValueError(f"spec.{name}: Trainmaster sets it")
    for name in set(_KEYS) & spec.keys():
        entries = spec[name]
        if not isinstance(entries, list) or any(_KEYS[name] not in each for each in entries):
            raise ValueError(f"spec.{name}: it is a list whose entries have `{_KEYS[name]}`")
    for container in spec.get("containers") or ():
        if container["name"] != WORKER:
            continue
        if container.get(_DIRECTIVE):
            raise ValueError(f"spec.containers: {WORKER} cannot be removed")
        for name in ("command", "args"):
            if name in container:
                raise ValueError(f"spec.containers: {name} of {WORKER}: Trainmaster sets it")
