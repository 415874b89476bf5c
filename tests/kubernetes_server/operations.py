"""What a request does to the objects: create, update, patch and delete, for clients and controllers alike."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kubernetes_server import deletion, ownership, statuses
from kubernetes_server.admission import admit
from kubernetes_server.kinds.names import metadata_causes
from kubernetes_server.kinds.strategies import strategy_of
from kubernetes_server.objects import Key, Object, clone, key_of, random_suffix, timestamp
from kubernetes_server.patches import json_patch, merge_patch, strategic_merge
from kubernetes_server.resources import DEFINITIONS, LEASES, NAMESPACES, Resource, Resources, resources_of_definition
from kubernetes_server.schema import prune
from kubernetes_server.statuses import StatusError, bad_request, conflict, invalid, not_found
from kubernetes_server.store import Store

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
PATCHES = (JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, APPLY_PATCH)
_SERVER_FIELDS = (
    "uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation", "selfLink",
)  # fmt: skip


Webhook = Callable[[Resource, Object, Object | None], None]
"""Called with a new object, or with a changed one and what it was: completes it, or raises StatusError."""


@dataclass(kw_only=True)
class Options:
    """The query of a request that changes something."""

    dry_run: bool = False
    manager: str = ""
    """Whose fields the changed ones become; empty for controllers, which record none."""
    force: bool = False
    validation: str = "Warn"
    subresource: str = ""
    warnings: list[str] = field(default_factory=list)
    """Filled by the operation."""


class Operations:
    def __init__(self, store: Store, resources: Resources) -> None:
        self.store = store
        self.resources = resources
        self.deletion = deletion.Deletion(self)
        self.webhooks: list[Webhook] = []

    def get(self, resource: Resource, key: Key) -> Object:
        obj = self.store.get(resource.store_key, key)
        if obj is None:
            raise not_found(resource, key[1])
        return obj

    def create(self, resource: Resource, namespace: str, body: Object, options: Options | None = None) -> Object:
        options = options or Options()
        obj = self._decode(resource, body, options)
        metadata = obj["metadata"]
        self._place(resource, namespace, metadata)
        if not metadata.get("name") and metadata.get("generateName"):
            metadata["name"] = f"{metadata['generateName'][:58]}{random_suffix()}"
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = timestamp()
        for name in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds", "managedFields"):
            metadata.pop(name, None)
        if resource.has_generation:
            metadata["generation"] = 1
        strategy = strategy_of(resource)
        if resource.has_status:
            obj.pop("status", None) if resource.plural != "nodes" else None
        admit(self.store, resource, obj)
        strategy.default(obj)
        name = metadata.get("name") or ""
        if causes := metadata_causes(resource, obj) + strategy.validate(obj):
            raise invalid(resource, name, causes)
        for webhook in self.webhooks:
            webhook(resource, obj, None)
        strategy.with_identity(obj)
        if self.store.get(resource.store_key, key_of(obj)) is not None:
            raise statuses.already_exists(resource, name)
        if options.manager:
            ownership.note_update(obj, None, options.manager)
        if options.dry_run:
            return obj
        stored = self.store.add(resource.store_key, obj)
        self._after_create(resource, stored)
        return stored

    def update(self, resource: Resource, key: Key, body: Object, options: Options | None = None) -> Object:
        options = options or Options()
        old = self.get(resource, key)
        obj = self._decode(resource, body, options)
        metadata = obj["metadata"]
        name = metadata.setdefault("name", key[1])
        if name != key[1]:
            raise bad_request(f"the name of the object ({name}) does not match the name on the URL ({key[1]})")
        self._place(resource, key[0], metadata)
        if (resource.custom or resource is LEASES) and not metadata.get("resourceVersion"):
            cause = statuses.invalid_value("metadata.resourceVersion", 0, "must be specified for an update")
            raise invalid(resource, name, [replace(cause, message=cause.message.replace("0:", "0x0:"))])
        return self._change(resource, old, obj, options)

    def patch(
        self, resource: Resource, key: Key, content_type: str, patch: Any, options: Options | None = None
    ) -> tuple[Object, bool]:
        """The changed object, and whether the patch created it."""
        options = options or Options()
        if content_type == APPLY_PATCH:
            return self._apply(resource, key, patch, options)
        old = self.get(resource, key)
        if content_type == JSON_PATCH:
            obj = json_patch(old, patch)
        elif content_type == MERGE_PATCH:
            obj = clone(merge_patch(old, patch))
        elif content_type == STRATEGIC_PATCH and not resource.custom:
            obj = clone(strategic_merge(old, patch))
        else:
            accepted = PATCHES if not resource.custom else (JSON_PATCH, MERGE_PATCH, APPLY_PATCH)
            raise statuses.unsupported_media_type(content_type, accepted)
        return self._change(resource, old, self._decode(resource, obj, options), options), False

    def modify(self, resource: Resource, key: Key, change: Callable[[Object], None]) -> Object | None:
        """Let a controller change a copy of an object; None if there is no such object."""
        old = self.store.get(resource.store_key, key)
        if old is None:
            return None
        new = clone(old)
        change(new)
        return self.commit(resource, old, new)

    def commit(self, resource: Resource, old: Object, new: Object) -> Object:
        """Store a changed object, or remove it if that was what its last finalizer was waiting for."""
        if new == old:
            return old
        metadata = new["metadata"]
        if (
            "deletionTimestamp" in metadata
            and not metadata.get("finalizers")
            and not metadata.get("deletionGracePeriodSeconds")
            and resource is not NAMESPACES
        ):
            # The change itself is not stored: watches see the object for the last time as it was.
            return self.store.remove(resource.store_key, key_of(new))
        if metadata.get("finalizers") == []:
            del metadata["finalizers"]
        return self.store.replace(resource.store_key, new)

    def _change(
        self, resource: Resource, old: Object, obj: Object, options: Options, *, applied: bool = False
    ) -> Object:
        metadata, before = obj["metadata"], old["metadata"]
        name = before["name"]
        version = metadata.get("resourceVersion")
        if version and version != before["resourceVersion"]:
            raise conflict(resource, name)
        if metadata.get("uid") and metadata["uid"] != before["uid"]:
            why = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {before['uid']}"
            raise conflict(resource, name, why)
        for each in (*_SERVER_FIELDS, "resourceVersion", *(() if "managedFields" in metadata else ("managedFields",))):
            metadata.pop(each, None)
            if each in before:
                metadata[each] = clone(before[each])
        if options.subresource == "status":
            new: Object = clone(old)
            new["status"] = obj.get("status", {})
        else:
            new = obj
            if resource.has_status:
                new.pop("status", None)
                if "status" in old:
                    new["status"] = clone(old["status"])
        strategy = strategy_of(resource)
        if options.subresource != "status":
            strategy.default_update(new)
            causes = metadata_causes(resource, new) + strategy.validate(new)
            if causes := causes + strategy.validate_update(new, old):
                raise invalid(resource, name, causes)
            for webhook in self.webhooks:
                webhook(resource, new, old)
            self._guard_finalizers(resource, new, old)
        if resource.has_generation and _specification(new) != _specification(old):
            new["metadata"]["generation"] = before.get("generation", 0) + 1
        if new == old:
            return old
        if options.manager and not applied:
            ownership.note_update(new, old, options.manager, options.subresource)
        if options.dry_run:
            return new
        stored = self.commit(resource, old, new)
        if resource is DEFINITIONS:
            self._after_create(resource, stored)
        return stored

    def _apply(self, resource: Resource, key: Key, patch: Object, options: Options) -> tuple[Object, bool]:
        if not options.manager:
            cause = statuses.required("fieldManager", "is required for apply patch")
            raise invalid(replace(resource, group="meta.k8s.io", kind="PatchOptions"), "", [cause])
        wanted = self._decode(resource, patch, options)
        if wanted["metadata"].get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        wanted["metadata"].setdefault("name", key[1])
        old = self.store.get(resource.store_key, key)
        if old is None and (version := wanted["metadata"].get("resourceVersion")):
            raise conflict(resource, key[1], f"resourceVersion {version} of an object that does not exist")
        if old is None:
            obj = ownership.apply(resource, None, wanted, manager=options.manager, force=options.force)
            fields = obj["metadata"].pop("managedFields")
            created = self.create(resource, key[0], obj, replace(options, manager="", dry_run=True))
            created["metadata"]["managedFields"] = fields
            if not options.dry_run:
                created = self.store.add(resource.store_key, created)
                self._after_create(resource, created)
            return created, True
        obj = ownership.apply(
            resource, old, wanted, manager=options.manager, force=options.force, subresource=options.subresource
        )
        if "resourceVersion" in wanted["metadata"]:
            obj["metadata"]["resourceVersion"] = wanted["metadata"]["resourceVersion"]
        return self._change(resource, old, obj, options, applied=True), False

    def _decode(self, resource: Resource, body: Any, options: Options) -> Object:
        if not isinstance(body, dict):
            raise bad_request("the object provided is unrecognized (must be of type Object)")
        api_version, kind = body.get("apiVersion", resource.api_version), body.get("kind", resource.kind)
        if kind != resource.kind or api_version != resource.api_version:
            raise bad_request(
                f"the API version in the data ({api_version}) does not match the expected API version "
                f"({resource.api_version})"
                if kind == resource.kind
                else f"{kind} in version {api_version!r} cannot be handled as a {resource.kind}"
            )
        obj: Object = {"apiVersion": api_version, "kind": kind, **clone(body)}
        obj["metadata"] = obj.get("metadata") or {}
        unknown = prune(resource, obj)
        if unknown and options.validation == "Strict":
            errors = ", ".join(f'unknown field "{name}"' for name in unknown)
            what = f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}'
            raise bad_request(f"{what}: strict decoding error: {errors}")
        if options.validation == "Warn":
            options.warnings += [f'unknown field "{name}"' for name in unknown]
        return obj

    def _place(self, resource: Resource, namespace: str, metadata: Object) -> None:
        if not resource.namespaced:
            metadata.pop("namespace", None)
            return
        if metadata.setdefault("namespace", namespace) != namespace:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")

    def _guard_finalizers(self, resource: Resource, new: Object, old: Object) -> None:
        before = old["metadata"].get("finalizers") or []
        added = [each for each in new["metadata"].get("finalizers") or [] if each not in before]
        if added and "deletionTimestamp" in old["metadata"]:
            text = f"no new finalizers can be added if the object is being deleted, found new finalizers {added}"
            cause = statuses.forbidden_field("metadata.finalizers", text)
            raise invalid(resource, new["metadata"]["name"], [cause])

    def _after_create(self, resource: Resource, obj: Object) -> None:
        if resource is DEFINITIONS:
            self.resources.remove(obj["spec"]["group"], obj["spec"]["names"]["plural"])
            for each in resources_of_definition(obj):
                self.resources.add(each)


def _specification(obj: Object) -> Object:
    return {name: value for name, value in obj.items() if name not in ("metadata", "status", "apiVersion", "kind")}


__all__ = ["PATCHES", "Operations", "Options", "StatusError"]
