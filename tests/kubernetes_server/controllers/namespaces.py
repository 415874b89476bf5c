"""Namespaces: what each has from the start, and how each ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kubernetes_server.controllers.loop import Controller
from kubernetes_server.deletion import DeleteOptions
from kubernetes_server.objects import Key, is_deleting
from kubernetes_server.resources import CONFIG_MAPS, NAMESPACES, SERVICE_ACCOUNTS
from kubernetes_server.store import Change

if TYPE_CHECKING:
    from kubernetes_server.cluster import Cluster


class NamespaceController(Controller):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.store.subscribe(NAMESPACES.store_key, self._changed)
        self.store.subscribe(None, self._emptied)

    def _changed(self, change: Change) -> None:
        if change.kind == "ADDED":
            # At once, so that a pod can be made right after its namespace.
            self._furnish(change.record.key[1])
        self.enqueue_change(change)

    def _emptied(self, change: Change) -> None:
        if change.kind == "DELETED" and change.record.key[0]:
            namespace = self.store.get(NAMESPACES.store_key, ("", change.record.key[0]))
            if namespace is not None and is_deleting(namespace):
                self.enqueue(("", change.record.key[0]))

    def _furnish(self, name: str) -> None:
        self.operations.create(SERVICE_ACCOUNTS, name, {"metadata": {"name": "default"}})
        certificate = self.cluster.certificate
        self.operations.create(
            CONFIG_MAPS, name, {"metadata": {"name": "kube-root-ca.crt"}, "data": {"ca.crt": certificate}}
        )

    def sync(self, key: Key) -> None:
        namespace = self.store.get(NAMESPACES.store_key, key)
        if namespace is None or not is_deleting(namespace):
            return
        for record in self.store.in_namespace(key[1]):
            if not is_deleting(record.object):
                resource = self.cluster.resources.of_store_key(record.store_key)
                self.operations.deletion.delete(resource, record.key, DeleteOptions(propagation="Background"))
        if not self.store.in_namespace(key[1]):
            self.store.remove(NAMESPACES.store_key, key)
