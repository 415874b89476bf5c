"""The garbage collector: what becomes of an object when its owners go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kubernetes_server.controllers.loop import Controller
from kubernetes_server.deletion import FOREGROUND, ORPHAN, DeleteOptions
from kubernetes_server.objects import Key, Object, is_deleting, owners_of
from kubernetes_server.store import Change, Record

if TYPE_CHECKING:
    from kubernetes_server.cluster import Cluster


class GarbageCollector(Controller):
    """Its keys are uids of owners, and of dependents whose owners nobody has seen."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.store.subscribe(None, self._changed)

    def _changed(self, change: Change) -> None:
        obj = change.record.object
        uid = obj["metadata"]["uid"]
        if change.kind == "DELETED":
            self.enqueue(("owner", uid))
            for owner in owners_of(obj):
                self.enqueue(("owner", owner["uid"]))
        elif is_deleting(obj) and {FOREGROUND, ORPHAN} & set(obj["metadata"].get("finalizers") or ()):
            self.enqueue(("owner", uid))
        elif change.kind == "ADDED" and any(self.store.with_uid(each["uid"]) is None for each in owners_of(obj)):
            self.enqueue(("dependent", uid))

    def sync(self, key: Key) -> None:
        kind, uid = key
        record = self.store.with_uid(uid)
        if kind == "dependent":
            if record is not None:
                self._collect(record)
            return
        dependents = self.store.dependents(uid)
        if record is None:
            for dependent in dependents:
                self._collect(dependent)
            return
        finalizers = record.object["metadata"].get("finalizers") or []
        if not is_deleting(record.object):
            return
        if ORPHAN in finalizers:
            for dependent in dependents:
                self._disown(dependent, uid)
            self._finish(record, ORPHAN)
        elif FOREGROUND in finalizers:
            for dependent in dependents:
                if not is_deleting(dependent.object):
                    self._delete(dependent, "Background")
            blocking = [
                each
                for each in self.store.dependents(uid)
                if any(owner["uid"] == uid and owner.get("blockOwnerDeletion") for owner in owners_of(each.object))
            ]
            if not blocking:
                self._finish(record, FOREGROUND)

    def _collect(self, dependent: Record) -> None:
        if not any(self.store.with_uid(owner["uid"]) for owner in owners_of(dependent.object)):
            self._delete(dependent, "Background")

    def _delete(self, record: Record, propagation: str) -> None:
        if self.store.record(record.store_key, record.key) is not None:
            resource = self.cluster.resources.of_store_key(record.store_key)
            self.operations.deletion.delete(resource, record.key, DeleteOptions(propagation=propagation))

    def _disown(self, record: Record, uid: str) -> None:
        def disown(obj: Object) -> None:
            owners = [owner for owner in owners_of(obj) if owner["uid"] != uid]
            if owners:
                obj["metadata"]["ownerReferences"] = owners
            else:
                obj["metadata"].pop("ownerReferences", None)

        self.operations.modify(self.cluster.resources.of_store_key(record.store_key), record.key, disown)

    def _finish(self, record: Record, finalizer: str) -> None:
        def finish(obj: Object) -> None:
            obj["metadata"]["finalizers"] = [each for each in obj["metadata"]["finalizers"] if each != finalizer]

        self.operations.modify(self.cluster.resources.of_store_key(record.store_key), record.key, finish)
