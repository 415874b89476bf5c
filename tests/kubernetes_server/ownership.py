"""Who manages which field (`metadata.managedFields`), and server-side apply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kubernetes_server.objects import Object, clone, timestamp
from kubernetes_server.patches import SETS, merge_keys
from kubernetes_server.resources import Resource
from kubernetes_server.statuses import StatusError

Fields = dict[str, Any]
"""A set of fields as FieldsV1 writes it: nested dictionaries with keys such as `f:spec` and `k:{"name":"a"}`."""
Path = tuple[str, ...]

_NOT_OWNED = {
    ("f:apiVersion",), ("f:kind",), ("f:metadata", "f:name"), ("f:metadata", "f:namespace"), ("f:metadata", "f:uid"),
    ("f:metadata", "f:resourceVersion"), ("f:metadata", "f:creationTimestamp"), ("f:metadata", "f:generation"),
    ("f:metadata", "f:managedFields"), ("f:metadata", "f:selfLink"), ("f:metadata", "f:deletionTimestamp"),
    ("f:metadata", "f:deletionGracePeriodSeconds"), ("f:metadata", "f:generateName"),
}  # fmt: skip


def leaves(value: Any, field: str = "", parent: str = "", at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each field of an object that has an owner of its own, with its value."""
    if at in _NOT_OWNED:
        return
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(item, name, field, (*at, f"f:{name}"))
    elif isinstance(value, list) and value and field in SETS:
        for item in value:
            yield (*at, f"v:{json.dumps(item)}"), item
    elif isinstance(value, list) and value and (keys := merge_keys(field, parent, value)):
        for item in value:
            identity = _identity(item, keys)
            yield (*at, identity), None
            for name, inner in item.items():
                yield from leaves(inner, name, field, (*at, identity, f"f:{name}"))
    elif at:
        yield at, value


def note_update(obj: Object, previous: Object | None, manager: str, subresource: str = "") -> None:
    """Record that a manager wrote the fields that differ from before."""
    metadata = obj["metadata"]
    now_there = dict(leaves(obj))
    before = dict(leaves(previous)) if previous else {}
    changed = {path for path, value in now_there.items() if path not in before or before[path] != value}
    entries = [dict(entry) for entry in metadata.get("managedFields") or []]
    mine = None
    for entry in entries:
        owned = set(_paths(entry["fieldsV1"])) & (now_there.keys() | {()})
        if (entry["manager"], entry["operation"], entry.get("subresource", "")) == (manager, "Update", subresource):
            mine = entry
            owned |= changed
            if changed:
                entry["time"] = timestamp()
        else:
            owned -= changed
        entry["fieldsV1"] = _fields(owned)
    if mine is None and changed:
        entries.append(_entry(obj, manager, "Update", subresource, changed))
    metadata["managedFields"] = [entry for entry in entries if entry["fieldsV1"]]
    if not metadata["managedFields"]:
        del metadata["managedFields"]


def apply(
    resource: Resource, live: Object | None, wanted: Object, *, manager: str, force: bool, subresource: str = ""
) -> Object:
    """Server-side apply: what the live object becomes when a manager says which fields it wants.

    Raises:
        StatusError: 409, since another manager owns a field with another value.
    """
    config = dict(leaves(wanted))
    result: Object = clone(live) if live else {"apiVersion": wanted["apiVersion"], "kind": wanted["kind"]}
    metadata = result.setdefault("metadata", {"name": wanted["metadata"].get("name")})
    there = dict(leaves(live)) if live else {}
    entries = [dict(entry) for entry in metadata.pop("managedFields", None) or []]
    mine = next((each for each in entries if (each["manager"], each["operation"]) == (manager, "Apply")), None)
    others = [entry for entry in entries if entry is not mine]
    clashes = [
        (entry, path)
        for entry in others
        for path in _paths(entry["fieldsV1"])
        if path in config and (path not in there or there[path] != config[path]) and not path[-1].startswith("k:")
    ]
    if clashes and not force:
        raise _conflict(clashes)
    before = set(_paths(mine["fieldsV1"])) if mine else set()
    owned_by_others = {path for entry in others for path in _paths(entry["fieldsV1"])}
    for path in sorted(before - config.keys() - owned_by_others, key=len, reverse=True):
        _remove(result, path)
    result = _overlay(result, {name: item for name, item in wanted.items() if name != "metadata"})
    wanted_metadata = {
        name: item for name, item in wanted.get("metadata", {}).items() if ("f:metadata", f"f:{name}") not in _NOT_OWNED
    }
    result["metadata"] = _overlay(result["metadata"], wanted_metadata, "metadata")
    lost = {path for _, path in clashes}
    for entry in others:
        entry["fieldsV1"] = _fields(set(_paths(entry["fieldsV1"])) - lost)
    entry = _entry(result, manager, "Apply", subresource, set(config))
    if mine is not None and mine["fieldsV1"] == entry["fieldsV1"]:
        entry["time"] = mine["time"]
    result["metadata"]["managedFields"] = [entry, *(each for each in others if each["fieldsV1"])]
    return result


def _overlay(target: Any, wanted: Any, field: str = "", parent: str = "") -> Any:
    if isinstance(wanted, dict) and isinstance(target, dict):
        result = dict(target)
        for name, item in wanted.items():
            result[name] = _overlay(result.get(name), item, name, field)
        return result
    if isinstance(wanted, list) and isinstance(target, list):
        if field in SETS:
            return [*target, *(item for item in wanted if item not in target)]
        if wanted and (keys := merge_keys(field, parent, wanted)):
            merged = list(target)
            for item in wanted:
                identity = _identity(item, keys)
                at = next((i for i, each in enumerate(merged) if _identity(each, keys) == identity), None)
                if at is None:
                    merged.append(clone(item))
                else:
                    merged[at] = _overlay(merged[at], item, field, parent)
            return merged
    return clone(wanted)


def _remove(obj: Any, path: Path) -> None:
    *above, last = path
    for part in above:
        obj = _child(obj, part)
        if obj is None:
            return
    if isinstance(obj, dict):
        obj.pop(last.removeprefix("f:"), None)
    elif isinstance(obj, list) and (child := _child(obj, last)) is not None:
        obj.remove(child)


def _child(obj: Any, part: str) -> Any:
    kind, _, text = part.partition(":")
    if kind == "f":
        return obj.get(text) if isinstance(obj, dict) else None
    if not isinstance(obj, list):
        return None
    wanted = json.loads(text)
    if kind == "v":
        return wanted if wanted in obj else None
    return next((each for each in obj if all(_default(each, name) == value for name, value in wanted.items())), None)


def _identity(item: Object, keys: Path) -> str:
    identity = {key: _default(item, key) for key in keys if _default(item, key) is not None}
    return f"k:{json.dumps(identity, separators=(',', ':'))}"


def _default(item: Object, key: str) -> Any:
    return item.get(key, "TCP" if key == "protocol" else None)


def _fields(paths: set[Path]) -> Fields:
    fields: Fields = {}
    for path in sorted(paths):
        inner = fields
        for part in path:
            inner = inner.setdefault(part, {})
        if path and path[-1].startswith("k:"):
            inner["."] = {}
    return fields


def _paths(fields: Fields, at: Path = ()) -> Iterator[Path]:
    for name, inner in fields.items():
        if name == ".":
            yield at
        elif inner:
            yield from _paths(inner, (*at, name))
        else:
            yield (*at, name)


def _entry(obj: Object, manager: str, operation: str, subresource: str, paths: set[Path]) -> Object:
    return {
        "manager": manager,
        "operation": operation,
        "apiVersion": obj["apiVersion"],
        "time": timestamp(),
        "fieldsType": "FieldsV1",
        "fieldsV1": _fields(paths),
        **({"subresource": subresource} if subresource else {}),
    }


def _conflict(clashes: list[tuple[Object, Path]]) -> StatusError:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{entry["manager"]}"'
            + ("" if entry["operation"] == "Apply" else f" using {entry['apiVersion']}"),
            "field": _dotted(path),
        }
        for entry, path in clashes
    ]
    if len(causes) == 1:
        text = f"Apply failed with 1 conflict: {causes[0]['message']}: {causes[0]['field']}"
    else:
        lines = "\n".join(f"- {cause['field']}" for cause in causes)
        text = f"Apply failed with {len(causes)} conflicts: {causes[0]['message']}:\n{lines}"
    return StatusError(409, "Conflict", text, {"causes": causes})


def _dotted(path: Path) -> str:
    text = ""
    for part in path:
        kind, _, name = part.partition(":")
        if kind == "k":
            keys = ",".join(f"{key}={json.dumps(value)}" for key, value in json.loads(name).items())
            text += f"[{keys}]"
        else:
            text += f".{name}"
    return text
