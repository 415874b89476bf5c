"""Events: what controllers and kubelets say about an object. Repeated ones are counted."""

from __future__ import annotations

import time

from kubernetes_server.objects import Object, timestamp
from kubernetes_server.operations import Operations
from kubernetes_server.resources import EVENTS
from kubernetes_server.statuses import StatusError


class EventRecorder:
    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._names: dict[tuple[str, ...], tuple[str, str]] = {}

    def record(
        self, obj: Object, reason: str, message: str, *, component: str, warning: bool = False, host: str = "",
        field_path: str = "",
    ) -> None:  # fmt: skip
        metadata = obj["metadata"]
        uid = metadata["uid"] if obj["kind"] != "Node" else metadata["name"]
        same = (uid, reason, message, component, field_path)
        if (key := self._names.get(same)) and self._operations.modify(EVENTS, key, _count):
            return
        at = timestamp()
        namespace = metadata.get("namespace") or "default"
        involved = {
            "kind": obj["kind"],
            **({"namespace": metadata["namespace"]} if metadata.get("namespace") else {}),
            "name": metadata["name"],
            "uid": uid,
            **({"apiVersion": obj["apiVersion"]} if obj["kind"] != "Node" else {}),
            **({"resourceVersion": metadata["resourceVersion"]} if "resourceVersion" in metadata else {}),
            **({"fieldPath": field_path} if field_path else {}),
        }
        name = f"{metadata['name']}.{time.time_ns():x}"
        event = {
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": involved,
            "reason": reason,
            "message": message,
            "source": {"component": component, **({"host": host} if host else {})},
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
            "type": "Warning" if warning else "Normal",
            "eventTime": None,
            "reportingComponent": component,
            "reportingInstance": host,
        }
        try:
            self._operations.create(EVENTS, namespace, event)
        except StatusError:
            return  # The namespace is being deleted.
        self._names[same] = (namespace, name)


def _count(event: Object) -> None:
    event["count"] += 1
    event["lastTimestamp"] = timestamp()
