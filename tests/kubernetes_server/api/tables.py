"""Tables: what `kubectl get` prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kubernetes_server.objects import Object, age_s, at_path, has_condition, instant, is_deleting
from kubernetes_server.resources import EVENTS, JOBS, NODES, PODS, Resource

Column = tuple[str, str, int, Callable[[Object], Any]]
"""Name, type, priority (1 is shown with `-o wide` only), and the cell of an object."""


def is_table_wanted(accept: str) -> bool:
    return "as=Table" in accept


def table(resource: Resource, objects: list[Object], metadata: Object, include: str, headers: bool = True) -> Object:
    columns = _columns(resource)
    definitions = [
        {
            "name": name,
            "type": kind,
            "format": "name" if name == "Name" else "",
            "description": "",
            "priority": priority,
        }
        for name, kind, priority, _ in columns
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": definitions if headers else None,
        "rows": [{"cells": [cell(obj) for *_, cell in columns], "object": _included(obj, include)} for obj in objects],
    }


def _included(obj: Object, include: str) -> Object | None:
    if include == "None":
        return None
    if include == "Object":
        return obj
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}


def _columns(resource: Resource) -> list[Column]:
    name: Column = ("Name", "string", 0, lambda obj: obj["metadata"]["name"])
    age: Column = ("Age", "string", 0, lambda obj: duration(age_s(obj["metadata"]["creationTimestamp"])))
    if resource.columns:
        return [name, *(_custom_column(*column) for column in resource.columns)]
    special: dict[Resource, list[Column]] = {
        PODS: [
            ("Ready", "string", 0, _ready),
            ("Status", "string", 0, pod_status),
            ("Restarts", "string", 0, lambda pod: str(sum(each["restartCount"] for each in _containers(pod)))),
            age,
            ("IP", "string", 1, lambda pod: pod["status"].get("podIP", "<none>")),
            ("Node", "string", 1, lambda pod: pod["spec"].get("nodeName", "<none>")),
        ],
        JOBS: [
            ("Status", "string", 0, _job_status),
            ("Completions", "string", 0, _completions),
            ("Duration", "string", 0, _job_duration),
            age,
        ],
        NODES: [
            ("Status", "string", 0, _node_status),
            ("Roles", "string", 0, lambda node: "<none>"),
            age,
            ("Version", "string", 0, lambda node: at_path(node, ("status", "nodeInfo", "kubeletVersion")) or ""),
        ],
    }
    if resource is EVENTS:
        return [
            ("Last Seen", "string", 0, lambda event: duration(age_s(event["lastTimestamp"]))),
            ("Type", "string", 0, lambda event: event["type"]),
            ("Reason", "string", 0, lambda event: event["reason"]),
            ("Object", "string", 0, _event_object),
            ("Message", "string", 0, lambda event: event["message"].strip()),
            ("Name", "string", 1, name[3]),
        ]
    return [name, *special.get(resource, [age])]


def duration(seconds: float) -> str:
    """As kubectl writes it: `5s`, `3m20s`, `2h`, `4d`."""
    left = max(int(seconds), 0)
    if left < 120:
        return f"{left}s"
    if left < 600:
        return f"{left // 60}m{left % 60}s" if left % 60 else f"{left // 60}m"
    if left < 3 * 3600:
        return f"{left // 60}m"
    return f"{left // 3600}h" if left < 48 * 3600 else f"{left // 86400}d"


def pod_status(pod: Object) -> str:
    status = pod["status"]
    text = str(status.get("reason") or status["phase"])
    initial = status.get("initContainerStatuses") or []
    for i, each in enumerate(initial):
        state = each["state"]
        if "terminated" in state and state["terminated"]["exitCode"] == 0:
            continue
        reason = (state.get("terminated") or state.get("waiting") or {}).get("reason")
        text = f"Init:{reason}" if reason and reason != "PodInitializing" else f"Init:{i}/{len(initial)}"
        break
    else:
        for each in reversed(_containers(pod)):
            reason = (each["state"].get("waiting") or each["state"].get("terminated") or {}).get("reason")
            text = reason or text
    if is_deleting(pod):
        return "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    return text


def _containers(pod: Object) -> list[Object]:
    return pod["status"].get("containerStatuses") or []


def _ready(pod: Object) -> str:
    return f"{sum(each['ready'] for each in _containers(pod))}/{len(pod['spec']['containers'])}"


def _job_status(job: Object) -> str:
    for kind in ("Complete", "Failed", "Suspended", "FailureTarget", "SuccessCriteriaMet"):
        if has_condition(job, kind):
            return kind
    return "Terminating" if is_deleting(job) else "Running"


def _completions(job: Object) -> str:
    succeeded = job.get("status", {}).get("succeeded", 0)
    wanted = job["spec"].get("completions")
    return f"{succeeded}/{wanted}" if wanted is not None else f"{succeeded}/1 of {job['spec']['parallelism']}"


def _job_duration(job: Object) -> str:
    status = job.get("status", {})
    if "startTime" not in status:
        return ""
    started = status["startTime"]
    if "completionTime" in status:
        return duration((instant(status["completionTime"]) - instant(started)).total_seconds())
    return duration(age_s(started))


def _node_status(node: Object) -> str:
    text = "Ready" if has_condition(node, "Ready") else "NotReady"
    return f"{text},SchedulingDisabled" if node["spec"].get("unschedulable") else text


def _event_object(event: Object) -> str:
    involved = event["involvedObject"]
    return f"{involved.get('kind', '').lower()}/{involved.get('name', '')}"


def _custom_column(name: str, kind: str, json_path: str) -> Column:
    def cell(obj: Object) -> Any:
        if json_path == ".metadata.creationTimestamp":
            return duration(age_s(obj["metadata"]["creationTimestamp"]))
        path, _, condition = json_path.partition("[?(@.type==")
        if condition:
            wanted, _, rest = condition.partition(")]")
            items = at_path(obj, path.strip(".").split(".")) or []
            found: Object = next((each for each in items if each.get("type") == wanted.strip("\"'")), {})
            return at_path(found, rest.strip(".").split("."))
        return at_path(obj, json_path.strip(".").split("."))

    return (name, kind, 0, cell)
