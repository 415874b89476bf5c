"""JSON patch, JSON merge patch and strategic merge patch."""

from __future__ import annotations

from typing import Any

from kubernetes_server.objects import Object, clone
from kubernetes_server.statuses import StatusError, bad_request

MERGE_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "conditions": ("type",),
    "addresses": ("type",),
    "ownerReferences": ("uid",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "secrets": ("name",),
    "schedulingGates": ("name",),
    "podIPs": ("ip",),
}
"""By which fields the elements of a list are told apart; other lists are replaced as a whole."""
PORT_KEYS = {"container": ("containerPort", "protocol"), "service": ("port", "protocol")}
SETS = ("finalizers",)
"""Lists that are sets of values."""


def json_patch(obj: Object, operations: Any) -> Object:
    """RFC 6902.

    Raises:
        StatusError: 400 for a patch that is none; 422 for one that does not apply.
    """
    if not isinstance(operations, list):
        raise bad_request("json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    document: Any = clone(obj)
    for operation in operations:
        try:
            document = _apply_operation(document, operation)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            message = f"the server rejected our request due to an error in our request: {error}"
            raise StatusError(422, "Invalid", message, {}) from error
    return dict(document)


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return clone(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merge_patch(result.get(name), value)
    return result


def strategic_merge(target: Any, patch: Any, field: str = "", *, parent: str = "") -> Any:
    """A merge patch whose lists of named elements are merged by their names."""
    if isinstance(patch, dict):
        if patch.get("$patch") == "replace":
            return {name: value for name, value in patch.items() if name != "$patch"}
        result = dict(target) if isinstance(target, dict) else {}
        for name, value in patch.items():
            if name.startswith(("$setElementOrder/", "$retainKeys")) or name == "$patch":
                continue
            if name.startswith("$deleteFromPrimitiveList/"):
                plain = name.partition("/")[2]
                result[plain] = [item for item in result.get(plain) or [] if item not in value]
            elif value is None:
                result.pop(name, None)
            else:
                result[name] = strategic_merge(result.get(name), value, name, parent=field)
        return result
    if isinstance(patch, list):
        return _merge_lists(target if isinstance(target, list) else [], patch, field, parent)
    return patch


def merge_keys(field: str, parent: str, elements: list[Any]) -> tuple[str, ...]:
    """The fields that tell the elements of a list apart; empty for a list that is one value."""
    if field == "ports":
        return PORT_KEYS["container" if any("containerPort" in each for each in elements) else "service"]
    if field == "tolerations" or (field == "conditions" and parent not in ("status", "")):
        return ()
    return MERGE_KEYS.get(field, ())


def _merge_lists(target: list[Any], patch: list[Any], field: str, parent: str) -> list[Any]:
    if field in SETS:
        return [*target, *(item for item in patch if item not in target)]
    keys = merge_keys(field, parent, patch)
    if not keys:
        return list(clone(patch))
    if any(item.get("$patch") == "replace" for item in patch):
        return [item for item in patch if "$patch" not in item]
    result = list(target)
    for item in patch:
        # The merge key of ports is the number alone.
        at = next((i for i, each in enumerate(result) if each.get(keys[0]) == item.get(keys[0])), None)
        if item.get("$patch") == "delete":
            if at is not None:
                del result[at]
        elif at is None:
            result.append(strategic_merge({}, item, field, parent=parent))
        else:
            result[at] = strategic_merge(result[at], item, field, parent=parent)
    return result


def _apply_operation(document: Any, operation: Object) -> Any:
    kind = operation["op"]
    path = _pointer(operation["path"])
    if kind in ("move", "copy"):
        source = _pointer(operation["from"])
        value = clone(_value_at(document, source))
        if kind == "move":
            document = _apply_operation(document, {"op": "remove", "path": operation["from"]})
    else:
        value = operation.get("value")
    if kind == "test":
        found = _value_at(document, path)
        if found != value:
            raise ValueError(f"testing path {operation['path']} failed")
        return document
    if not path:
        return value
    parent = _value_at(document, path[:-1])
    last = path[-1]
    if isinstance(parent, list):
        at = len(parent) if last == "-" else int(last)
        if kind == "remove":
            del parent[at]
        elif kind == "replace":
            parent[at] = value
        else:
            if at > len(parent):
                raise IndexError(f"Unable to access invalid index: {at}")
            parent.insert(at, value)
    elif not isinstance(parent, dict):
        raise KeyError(f"path {operation['path']} does not exist")
    elif kind == "remove":
        del parent[last]
    else:
        if kind == "replace" and last not in parent:
            raise KeyError(f"replace operation does not apply: doc is missing key: {operation['path']}")
        parent[last] = value
    return document


def _pointer(text: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]


def _value_at(document: Any, path: list[str]) -> Any:
    for part in path:
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document
