"""Taints and tolerations."""

from __future__ import annotations

from kubernetes_server.objects import Object


def toleration_of(tolerations: list[Object], taint: Object) -> Object | None:
    return next((each for each in tolerations if _tolerates(each, taint)), None)


def is_tolerated(tolerations: list[Object], taint: Object) -> bool:
    return toleration_of(tolerations, taint) is not None


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if toleration.get("key") and toleration["key"] != taint["key"]:
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return True
    return bool(toleration.get("key")) and toleration.get("value", "") == taint.get("value", "")
