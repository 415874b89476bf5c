"""Deletion: grace periods, finalizers and propagation policies."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from kubernetes_server import statuses
from kubernetes_server.objects import Key, Object, clone, is_deleting, now, timestamp
from kubernetes_server.resources import CLAIMS, DEFINITIONS, NAMESPACES, PODS, SERVICE_ACCOUNTS, SERVICES, Resource

if TYPE_CHECKING:
    from kubernetes_server.operations import Operations

FOREGROUND = "foregroundDeletion"
ORPHAN = "orphan"
_RETURN_OBJECT = (PODS, SERVICES, SERVICE_ACCOUNTS, CLAIMS)
ORPHAN_WARNING = (
    "child pods are preserved by default when jobs are deleted; set propagationPolicy=Background to remove them or "
    "set propagationPolicy=Orphan to suppress this warning"
)


@dataclass(kw_only=True)
class DeleteOptions:
    grace_s: int | None = None
    propagation: str | None = None
    uid: str | None = None
    version: str | None = None
    dry_run: bool = False


class Deletion:
    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def delete(self, resource: Resource, key: Key, options: DeleteOptions | None = None) -> Object:
        """Delete an object, or begin to; what the server answers: the object, or a Status."""
        options = options or DeleteOptions()
        old = self._operations.get(resource, key)
        self._check(resource, old, options)
        new = clone(old)
        metadata = new["metadata"]
        finalizers = _finalizers(resource, metadata.get("finalizers") or [], options.propagation)
        if finalizers:
            metadata["finalizers"] = finalizers
        else:
            metadata.pop("finalizers", None)
        grace_s = _grace_s(resource, old, options.grace_s)
        if is_deleting(old) and grace_s >= (old["metadata"].get("deletionGracePeriodSeconds") or 0):
            return old if options.dry_run else self._operations.commit(resource, old, new)
        if grace_s or finalizers or resource is NAMESPACES:
            metadata["deletionTimestamp"] = timestamp(now() + timedelta(seconds=grace_s))
            metadata["deletionGracePeriodSeconds"] = grace_s
            if resource is NAMESPACES:
                new["status"] = {**new.get("status", {}), "phase": "Terminating"}
                metadata.pop("deletionGracePeriodSeconds")
            if resource.has_generation:
                metadata["generation"] = metadata.get("generation", 0) + 1
            return new if options.dry_run else self._operations.commit(resource, old, new)
        if not options.dry_run:
            old = self._operations.store.remove(resource.store_key, key)
            if resource is DEFINITIONS:
                self._remove_custom(old)
        if resource in _RETURN_OBJECT:
            return old
        return statuses.success(resource, key[1], old["metadata"]["uid"])

    def _check(self, resource: Resource, old: Object, options: DeleteOptions) -> None:
        metadata = old["metadata"]
        for name, wanted, found in (
            ("UID", options.uid, metadata["uid"]),
            ("ResourceVersion", options.version, metadata["resourceVersion"]),
        ):
            if wanted is not None and wanted != found:
                why = f"Precondition failed: {name} in precondition: {wanted}, {name} in object meta: {found}"
                raise statuses.conflict(resource, metadata["name"], why)

    def _remove_custom(self, definition: Object) -> None:
        spec = definition["spec"]
        store_key = (spec["group"], spec["names"]["plural"])
        store = self._operations.store
        for record in store.records(store_key):
            store.remove(store_key, record.key)
        self._operations.resources.remove(*store_key)


def delete_options(body: Any, query: dict[str, str]) -> DeleteOptions:
    """From the body and the query of a request, of which the body comes first."""
    body = body if isinstance(body, dict) else {}
    grace: Any = body.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
    propagation = body.get("propagationPolicy") or query.get("propagationPolicy")
    orphan = body.get("orphanDependents", query.get("orphanDependents"))
    if propagation not in (None, "Background", "Foreground", "Orphan"):
        cause = statuses.unsupported("propagationPolicy", propagation, ("Background", "Foreground", "Orphan", "nil"))
        raise statuses.StatusError(
            422,
            "Invalid",
            f'DeleteOptions.meta.k8s.io "" is invalid: {cause.field}: {cause.message}',
            {"group": "meta.k8s.io", "kind": "DeleteOptions"},
        )
    if orphan is not None and propagation is None:
        propagation = "Orphan" if str(orphan).lower() == "true" else "Background"
    preconditions = body.get("preconditions") or {}
    return DeleteOptions(
        grace_s=None if grace is None else max(int(grace), 0),
        propagation=propagation,
        uid=preconditions.get("uid"),
        version=preconditions.get("resourceVersion"),
        dry_run=bool(body.get("dryRun") or query.get("dryRun")),
    )


def _finalizers(resource: Resource, present: list[str], propagation: str | None) -> list[str]:
    if propagation is None:
        if ORPHAN in present or FOREGROUND in present:
            return present
        propagation = "Background" if resource.defaults_to_background else "Orphan"
    others = [each for each in present if each not in (FOREGROUND, ORPHAN)]
    added = {"Foreground": [FOREGROUND], "Orphan": [ORPHAN]}.get(propagation, [])
    return others + added


def _grace_s(resource: Resource, obj: Object, wanted_s: int | None) -> int:
    """Only pods have time to end: those that are on a node and have not ended."""
    if resource is not PODS:
        return 0
    if not obj["spec"].get("nodeName") or obj["status"].get("phase") in ("Succeeded", "Failed"):
        return 0
    return int(obj["spec"].get("terminationGracePeriodSeconds", 30)) if wanted_s is None else wanted_s
