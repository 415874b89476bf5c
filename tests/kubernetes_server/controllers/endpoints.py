"""The endpoints of services, and the names by which pods find each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kubernetes_server.controllers.job_rules import is_finished, is_ready
from kubernetes_server.controllers.loop import Controller
from kubernetes_server.objects import Key, Object, key_of, labels_of
from kubernetes_server.resources import ENDPOINTS, PODS, SERVICES
from kubernetes_server.store import Change

if TYPE_CHECKING:
    from kubernetes_server.cluster import Cluster

DOMAIN = "svc.cluster.local"


class EndpointsController(Controller):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.store.subscribe(SERVICES.store_key, self.enqueue_change)
        self.store.subscribe(PODS.store_key, self._pod_changed)

    def _pod_changed(self, change: Change) -> None:
        labels = labels_of(change.record.object)
        for service in self.store.objects(SERVICES.store_key, change.record.key[0]):
            if _selects(service, labels):
                self.enqueue(key_of(service))

    def sync(self, key: Key) -> None:
        service = self.store.get(SERVICES.store_key, key)
        old = self.store.get(ENDPOINTS.store_key, key)
        if service is None or not service["spec"].get("selector"):
            if service is None and old is not None:
                self.store.remove(ENDPOINTS.store_key, key)
        else:
            self._write(key, service, old)
        self.cluster.names_changed(key[0])

    def _write(self, key: Key, service: Object, old: Object | None) -> None:
        pods = [pod for pod in self.store.objects(PODS.store_key, key[0]) if _selects(service, labels_of(pod))]
        pods = sorted((pod for pod in pods if pod["status"].get("podIP") and not is_finished(pod)), key=key_of)
        early = service["spec"].get("publishNotReadyAddresses", False)
        ready = [_address(pod, key[1]) for pod in pods if early or is_ready(pod)]
        unready = [_address(pod, key[1]) for pod in pods if not (early or is_ready(pod))]
        ports = [
            {**({"name": port["name"]} if "name" in port else {}), "port": port["targetPort"], "protocol": "TCP"}
            for port in service["spec"].get("ports") or ()
        ]
        subset = {
            **({"addresses": ready} if ready else {}),
            **({"notReadyAddresses": unready} if unready else {}),
            **({"ports": ports} if ports else {}),
        }
        subsets = {"subsets": [subset]} if ready or unready else {}
        if old is None:
            self.operations.create(ENDPOINTS, key[0], {"metadata": {"name": key[1]}, **subsets})
        else:

            def change(endpoints: Object) -> None:
                endpoints.pop("subsets", None)
                endpoints.update(subsets)

            self.operations.modify(ENDPOINTS, key, change)


def host_lines(endpoints: list[Object]) -> list[str]:
    """What /etc/hosts of the pods in a namespace says about its services."""
    lines = []
    for each in endpoints:
        namespace, service = key_of(each)
        for subset in each.get("subsets") or ():
            for address in subset.get("addresses") or ():
                names = [
                    f"{service}.{namespace}.{DOMAIN}",
                    f"{service}.{namespace}.svc",
                    f"{service}.{namespace}",
                    service,
                ]
                if hostname := address.get("hostname"):
                    names = [f"{hostname}.{name}" for name in names] + names
                lines.append(f"{address['ip']}\t{' '.join(names)}")
    return lines


def _selects(service: Object, labels: dict[str, str]) -> bool:
    selector = service["spec"].get("selector") or {}
    return bool(selector) and all(labels.get(name) == value for name, value in selector.items())


def _address(pod: Object, service: str) -> Object:
    spec, metadata = pod["spec"], pod["metadata"]
    named = {"hostname": spec["hostname"]} if spec.get("hostname") and spec.get("subdomain") == service else {}
    reference = {"kind": "Pod", "namespace": metadata["namespace"], "name": metadata["name"], "uid": metadata["uid"]}
    return {"ip": pod["status"]["podIP"], **named, "nodeName": spec.get("nodeName", ""), "targetRef": reference}
