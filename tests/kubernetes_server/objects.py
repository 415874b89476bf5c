"""API objects as plain dictionaries: how their common parts are read and written."""

from __future__ import annotations

import random
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]
Key = tuple[str, str]
"""Namespace (empty for cluster-scoped objects) and name."""

_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


def clone(value: Any) -> Any:
    """A deep copy of JSON: several times faster than `copy.deepcopy`."""
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clone(item) for item in value]
    return value


def now() -> datetime:
    return datetime.now(UTC)


def timestamp(at: datetime | None = None) -> str:
    return (at or now()).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp(at: datetime | None = None) -> str:
    return (at or now()).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def instant(text: str) -> datetime:
    """The time that a timestamp of either precision says."""
    return datetime.fromisoformat(text)


def age_s(text: str) -> float:
    return (now() - instant(text)).total_seconds()


def random_suffix(length: int = 5) -> str:
    return "".join(random.choices(_SUFFIX_LETTERS, k=length))


def key_of(obj: Object) -> Key:
    metadata = obj["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def labels_of(obj: Object) -> dict[str, str]:
    return obj["metadata"].get("labels") or {}


def annotations_of(obj: Object) -> dict[str, str]:
    return obj["metadata"].get("annotations") or {}


def is_deleting(obj: Object) -> bool:
    return "deletionTimestamp" in obj["metadata"]


def owners_of(obj: Object) -> list[Object]:
    return obj["metadata"].get("ownerReferences") or []


def controller_of(obj: Object) -> Object | None:
    return next((owner for owner in owners_of(obj) if owner.get("controller")), None)


def owner_reference(owner: Object) -> Object:
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def condition_of(obj: Object, kind: str) -> Object | None:
    conditions: list[Object] = (obj.get("status") or {}).get("conditions") or []
    return next((condition for condition in conditions if condition["type"] == kind), None)


def has_condition(obj: Object, kind: str, status: str = "True") -> bool:
    condition = condition_of(obj, kind)
    return condition is not None and condition["status"] == status


def set_condition(conditions: list[Object], kind: str, status: str, **fields: str) -> bool:
    """Add or change one condition of a list in place; whether anything but a time changed."""
    for condition in conditions:
        if condition["type"] == kind:
            wanted = {"status": status, **fields}
            if {name: condition[name] for name in ("status", "reason", "message") if name in condition} == wanted:
                return False
            if condition["status"] != status:
                condition["lastTransitionTime"] = timestamp()
            for name in ("reason", "message"):
                condition.pop(name, None)
            condition.update(wanted)
            return True
    conditions.append({"type": kind, "status": status, "lastTransitionTime": timestamp(), **fields})
    return True


def at_path(obj: Any, path: Iterable[str]) -> Any:
    """The value at a path of dictionary keys, or None."""
    for part in path:
        if not isinstance(obj, dict):
            return None
        obj = obj.get(part)
    return obj
