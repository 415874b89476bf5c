"""The pods that a Job makes from its template."""

from __future__ import annotations

from kubernetes_server.controllers.job_rules import is_indexed
from kubernetes_server.kinds.jobs import INDEX, TRACKING
from kubernetes_server.objects import Object, clone, owner_reference, random_suffix


def new_pod(job: Object, index: int) -> Object:
    """A pod for an index of a job, or for none in particular if it is not Indexed."""
    name = job["metadata"]["name"]
    template = clone(job["spec"]["template"])
    metadata = template.get("metadata") or {}
    prefix = f"{name}-{index}-" if is_indexed(job) else f"{name}-"
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": prefix,
            "name": f"{prefix[:58]}{random_suffix()}",
            "labels": metadata.get("labels") or {},
            "annotations": metadata.get("annotations") or {},
            "finalizers": [*(metadata.get("finalizers") or ()), TRACKING],
            "ownerReferences": [owner_reference(job)],
        },
        "spec": template["spec"],
    }
    if is_indexed(job):
        _set_index(pod, name, index)
    if not pod["metadata"]["annotations"]:
        del pod["metadata"]["annotations"]
    return pod


def _set_index(pod: Object, job_name: str, index: int) -> None:
    spec, metadata = pod["spec"], pod["metadata"]
    metadata["annotations"][INDEX] = metadata["labels"][INDEX] = str(index)
    spec.setdefault("hostname", f"{job_name}-{index}")
    variable = {
        "name": "JOB_COMPLETION_INDEX",
        "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.labels['{INDEX}']"}},
    }
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        environment = container.setdefault("env", [])
        if not any(each["name"] == variable["name"] for each in environment):
            environment.append(clone(variable))
