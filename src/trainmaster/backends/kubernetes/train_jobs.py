"""An attempt as a TrainJob of Kubeflow Trainer, which makes a JobSet, Jobs and pods of it. Pure.

A TrainJob says what differs from its runtime, and not all that a pod has can be said there. What cannot be is either
left out, as `LEFT_OUT` says, or makes the attempt an Indexed Job.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.backends.cluster.engine import EngineLaunch
from trainmaster.backends.kubernetes import manifests
from trainmaster.backends.kubernetes.manifests import NODE
from trainmaster.backends.kubernetes.overlays import WORKER

Manifest = dict[str, Any]

GROUP = "trainer.kubeflow.org"
API_VERSION = f"{GROUP}/v1alpha1"
KIND = "TrainJob"
SCHEMA = "org.kubeflow.trainer.v1alpha1.TrainJob"
"""What the API server's OpenAPI documents call it."""
ANCESTOR, FRAMEWORK = f"{GROUP}/trainjob-ancestor-step", f"{GROUP}/framework"
SET_NAME, REPLICATED_JOB = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/replicatedjob-name"
WHY_NOT = f"{manifests.PREFIX}no-train-job"
"""The annotation of an Indexed Job that says why it is no TrainJob, though the attempt asks for a runtime."""

LEFT_OUT = ("automountServiceAccountToken", "enableServiceLinks", "restartPolicy", "subdomain")
"""What our pods have and those of a TrainJob have as their runtime says."""
_LEFT_OUT_IF_NEEDED = "terminationGracePeriodSeconds"
"""Before Trainer 2.3 the runtime alone says how long its pods have after SIGTERM."""
_OF_TRAINER = frozenset({"name", "image", "imagePullPolicy", "command", "env", "resources"})
"""What a TrainJob says of the container by `spec.trainer`."""
_MANAGER = f"{manifests.PREFIX}trainmaster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How TrainJobs of the installed version change the pods of their runtime."""

    field: str
    pod: frozenset[str]
    """The fields of a pod's specification that can be changed."""
    container: frozenset[str]
    has_metadata: bool
    """Whether labels and annotations of pods can be added."""
    has_deadline: bool


def dialect_of(schema: Mapping[str, Any]) -> Dialect | None:
    """From the schema of a TrainJob; None: it is of a version that is not known."""
    spec = _below(schema, "spec")
    whole = _below(spec, "runtimePatches", "trainingRuntimeSpec", "template", "spec", "replicatedJobs", "template")
    templates = {
        "runtimePatches": _below(whole, "spec", "template"),
        "podTemplateOverrides": _below(spec, "podTemplateOverrides"),
        "podSpecOverrides": {"properties": {"spec": _below(spec, "podSpecOverrides")}},
    }
    for field, template in templates.items():
        pod = _properties(_below(template, "spec"))
        if pod:
            return Dialect(
                field=field,
                pod=frozenset(pod) - {"targetJobs"},
                container=frozenset(_properties(_below(template, "spec", "containers"))) or frozenset({"volumeMounts"}),
                has_metadata="metadata" in _properties(template),
                has_deadline="activeDeadlineSeconds" in _properties(spec),
            )
    return None


def _below(schema: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        found = _properties(schema).get(name) or {}
        schema = found.get("items") or found
    return schema


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema.get("properties") or {}


def unsuited(runtime: Mapping[str, Any]) -> str:
    """Why a worker cannot be the trainer of a runtime; empty: it can.

    The worker is what starts and connects the processes of a job, and what fetches its data, wherever it runs.
    """
    spec = runtime.get("spec") or {}
    if "mpi" in (spec.get("mlPolicy") or {}):
        return "its runtime starts processes with MPI"
    jobs = ((spec.get("template") or {}).get("spec") or {}).get("replicatedJobs") or []
    if [job.get("name") for job in jobs] != [NODE] or _step(jobs[0]) != "trainer":
        return f"its runtime has other jobs than {NODE}, such as initializers"
    return ""


def _step(job: Mapping[str, Any]) -> str:
    return str((((job.get("template") or {}).get("metadata") or {}).get("labels") or {}).get(ANCESTOR, ""))


def inexpressible(template: Manifest, dialect: Dialect) -> str:
    """What of a pod template no TrainJob of this version can say; empty: it can say everything."""
    spec = dict(template["spec"])
    containers = spec.pop("containers")
    for name in (*LEFT_OUT, _LEFT_OUT_IF_NEEDED):
        spec.pop(name, None)
    # Of init containers, only those of the runtime can be changed.
    if wrong := sorted(spec.keys() - (dialect.pod - {"initContainers"})):
        return f"TrainJobs of this cluster cannot say {', '.join(wrong)} of their pods"
    if others := [each["name"] for each in containers if each["name"] != WORKER]:
        return f"TrainJobs have no further containers, such as {others[0]}"
    if wrong := sorted(containers[0].keys() - dialect.container - _OF_TRAINER):
        return f"TrainJobs of this cluster cannot say {', '.join(wrong)} of their containers"
    image, policy = containers[0]["image"], containers[0].get("imagePullPolicy")
    # An image that is pulled more often than it need be is the same, or newer.
    if policy not in (None, "IfNotPresent", _default_policy(image)):
        return f"TrainJobs cannot say that the image is pulled {policy}"
    if not dialect.has_metadata and _own_metadata(template):
        return "TrainJobs of this cluster cannot give their pods labels and annotations"
    return ""


def _own_metadata(template: Manifest) -> bool:
    """Whether a template has labels or annotations that are not ours."""
    head = template.get("metadata") or {}
    return any(
        not key.startswith((manifests.PREFIX, manifests.MANAGED_BY))
        for part in ("labels", "annotations")
        for key in head.get(part) or {}
    )


def _default_policy(image: str) -> str:
    """When Kubernetes pulls an image if nobody says.

    >>> _default_policy("python:3.11"), _default_policy("localhost:5000/python"), _default_policy("a@sha256:0")
    ('IfNotPresent', 'Always', 'IfNotPresent')
    """
    if "@" in image:
        return "IfNotPresent"
    tag = image.rpartition("/")[2].partition(":")[2]
    return "Always" if tag in ("", "latest") else "IfNotPresent"


def started() -> Manifest:
    """The patch that marks a TrainJob once its Secret is there: from then on there is nothing left to do."""
    return {"metadata": {"annotations": {manifests.STARTED: "true"}}}


_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_LONGEST_POD = 63
_OURS = "tm-"


def name_of(launch: EngineLaunch, dialect: Dialect) -> str:
    """The name of an attempt's TrainJob: that of its job, where it can be, as clients of Kubeflow look for it.

    Another may have it already. Where pods cannot have our labels, they are known by the name of the attempt.
    """
    handle, number = launch.needs.handle, launch.request.attempt
    name = handle if number == 1 else f"{handle}-attempt-{number}"
    longest = f"{name}-{NODE}-0-{launch.node_count - 1}-abcde"
    fits = dialect.has_metadata and _NAME.fullmatch(name) is not None and len(longest) <= _LONGEST_POD
    return name if handle and fits and not name.startswith(_OURS) else launch.name


def train_job(launch: EngineLaunch, template: Manifest, dialect: Dialect) -> Manifest:
    """It is not suspended: clients of Kubeflow never again call one Running that was. Its pods wait for the Secret."""
    asked = launch.request.launch.kubernetes
    container = next(each for each in template["spec"]["containers"] if each["name"] == WORKER)
    trainer: Manifest = {
        "image": container["image"],
        "command": container["command"],
        "env": container["env"],
        "numNodes": launch.node_count,
        **({"resourcesPerNode": container["resources"]} if container.get("resources") else {}),
    }
    spec: Manifest = {
        "runtimeRef": {"apiGroup": GROUP, "kind": asked.runtime_kind, "name": asked.runtime},
        "trainer": trainer,
        dialect.field: [_patch(template, container, dialect)],
    }
    if dialect.has_deadline and launch.request.max_runtime_s is not None:
        spec["activeDeadlineSeconds"] = math.ceil(launch.request.max_runtime_s + manifests.SETUP_S + launch.grace_s)
    head = {**manifests.metadata_of_job(launch), "name": name_of(launch, dialect)}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": head, "spec": spec}


def _patch(template: Manifest, container: Manifest, dialect: Dialect) -> Manifest:
    left = {name: value for name, value in container.items() if name in dialect.container and name not in _OF_TRAINER}
    skipped = (*LEFT_OUT, "containers")
    pod = {name: value for name, value in template["spec"].items() if name in dialect.pod and name not in skipped}
    spec = {**pod, **({"containers": [{"name": NODE, **left}]} if left else {})}
    changed = {**({"metadata": template["metadata"]} if dialect.has_metadata else {}), "spec": spec}
    if dialect.field == "podSpecOverrides":
        return {"targetJobs": [{"name": NODE}], **spec}
    if dialect.field == "podTemplateOverrides":
        return {"targetJobs": [{"name": NODE}], **changed}
    job = {"name": NODE, "template": {"spec": {"template": changed}}}
    return {"manager": _MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
