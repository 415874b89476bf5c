"""The environment, the command and the downward API of containers."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from decimal import ROUND_CEILING
from typing import Any

from kubernetes_server.objects import Object, annotations_of, labels_of
from kubernetes_server.quantities import quantity
from kubernetes_server.resources import CONFIG_MAPS, SECRETS
from kubernetes_server.store import Store

_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z0-9_.-]+)\))")


class ContainerConfigError(Exception):
    """A container names what does not exist (reason CreateContainerConfigError)."""


def expand(text: str, values: dict[str, str]) -> str:
    """`$(NAME)` is replaced if there is such a variable; `$$` is a dollar sign."""

    def replacement(found: re.Match[str]) -> str:
        if found[1] == "$":
            return "$"
        return values.get(found[2], found[0])

    return _REFERENCE.sub(replacement, text)


def environment_of(store: Store, pod: Object, container: Object, base: dict[str, str]) -> dict[str, str]:
    """
    Raises:
        ContainerConfigError: a ConfigMap, a Secret or a key in one is missing.
    """
    values: dict[str, str] = {}
    namespace = pod["metadata"]["namespace"]
    for source in container.get("envFrom") or ():
        for kind, reader in (("configMapRef", config_map), ("secretRef", secret)):
            if reference := source.get(kind):
                found = reader(store, namespace, reference["name"], reference.get("optional", False))
                values |= {f"{source.get('prefix', '')}{name}": value.decode() for name, value in found.items()}
    for variable in container.get("env") or ():
        name = variable["name"]
        if source := variable.get("valueFrom"):
            value = _value_from(store, pod, container, source)
            if value is not None:
                values[name] = value
        else:
            values[name] = expand(variable.get("value") or "", values)
    return {**base, "HOSTNAME": host_name(pod), **values}


def command_of(container: Object, image: Object, values: dict[str, str]) -> list[str]:
    """As the entrypoint and the command of an image are replaced."""
    command, args = container.get("command"), container.get("args")
    words = [*(command or image["entrypoint"]), *(args or (() if command else image["command"]))]
    return [expand(word, values) for word in words]


def host_name(pod: Object) -> str:
    return str(pod["spec"].get("hostname") or pod["metadata"]["name"])[:63].rstrip("-.")


def field_of(pod: Object, path: str) -> str:
    """A field that the downward API offers."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod["status"]
    found = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if found:
        values = labels_of(pod) if found[1] == "labels" else annotations_of(pod)
        return values.get(found[2], "")
    if path in ("metadata.labels", "metadata.annotations"):
        values = labels_of(pod) if path.endswith("labels") else annotations_of(pod)
        return "".join(f'{name}="{value}"\n' for name, value in sorted(values.items()))[:-1]
    fields: dict[str, Any] = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName"),
        "spec.serviceAccountName": spec.get("serviceAccountName"),
        "status.podIP": status.get("podIP"),
        "status.podIPs": status.get("podIP"),
        "status.hostIP": status.get("hostIP"),
        "status.hostIPs": status.get("hostIP"),
    }
    return str(fields.get(path) or "")


def resource_of(container: Object, reference: Object) -> str:
    kind, _, name = reference["resource"].partition(".")
    amounts = (container.get("resources") or {}).get(kind) or {}
    value = quantity(amounts.get(name, "0")) / quantity(reference.get("divisor") or "1")
    return str(value.to_integral_value(ROUND_CEILING))


def config_map(store: Store, namespace: str, name: str, optional: bool) -> dict[str, bytes]:
    obj = _required(lambda: store.get(CONFIG_MAPS.store_key, (namespace, name)), "configmap", name, optional)
    texts = {key: value.encode() for key, value in (obj.get("data") or {}).items()}
    return texts | {key: base64.b64decode(value) for key, value in (obj.get("binaryData") or {}).items()}


def secret(store: Store, namespace: str, name: str, optional: bool) -> dict[str, bytes]:
    obj = _required(lambda: store.get(SECRETS.store_key, (namespace, name)), "secret", name, optional)
    return {key: base64.b64decode(value) for key, value in (obj.get("data") or {}).items()}


def _required(find: Callable[[], Object | None], kind: str, name: str, optional: bool) -> Object:
    obj = find()
    if obj is None and not optional:
        raise ContainerConfigError(f'{kind} "{name}" not found')
    return obj or {}


def _value_from(store: Store, pod: Object, container: Object, source: Object) -> str | None:
    namespace = pod["metadata"]["namespace"]
    for kind, reader, label in (("configMapKeyRef", config_map, "ConfigMap"), ("secretKeyRef", secret, "Secret")):
        if reference := source.get(kind):
            optional = reference.get("optional", False)
            found = reader(store, namespace, reference["name"], optional)
            if reference["key"] in found:
                return found[reference["key"]].decode()
            if optional:
                return None
            text = f"couldn't find key {reference['key']} in {label} {namespace}/{reference['name']}"
            raise ContainerConfigError(text)
    if reference := source.get("resourceFieldRef"):
        return resource_of(container, reference)
    return field_of(pod, source["fieldRef"]["fieldPath"])
