"""The custom resources of JobSet and of Trainer, with as much of their schemas as clients can see an effect of."""

from __future__ import annotations

from typing import Any

from kubernetes_server.objects import Object
from kubernetes_server.resources import Resource, resources_of_definition

TRAINER = "trainer.kubeflow.org"
JOBSET = "jobset.x-k8s.io"
VERSIONS = ("2.0", "2.3")
"""Of Trainer."""
_ANY = {"x-kubernetes-preserve-unknown-fields": True}
_SPEC = (
    "runtimeRef", "initializer", "trainer", "labels", "annotations", "suspend", "managedBy",
)  # fmt: skip
_SPEC_SINCE = {
    "2.0": ("podSpecOverrides",),
    "2.3": ("podTemplateOverrides", "runtimePatches", "activeDeadlineSeconds"),
}


def _definition(
    group: str, version: str, kind: str, spec: dict[str, Any], *, scope: str = "Namespaced", status: bool = True
) -> Object:
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "properties": {"spec": spec, **({"status": _ANY} if status else {})}}
    served = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        **({"subresources": {"status": {}}} if status else {}),
    }
    return {
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "names": {"plural": plural, "kind": kind}, "scope": scope, "versions": [served]},
    }


def definitions(trainer_version: str) -> list[Object]:
    fields = dict.fromkeys((*_SPEC, *_SPEC_SINCE[trainer_version]), _ANY)
    return [
        _definition(JOBSET, "v1alpha2", "JobSet", _ANY),
        _definition(TRAINER, "v1alpha1", "TrainJob", {"type": "object", "properties": fields}),
        _definition(TRAINER, "v1alpha1", "TrainingRuntime", _ANY, status=False),
        _definition(TRAINER, "v1alpha1", "ClusterTrainingRuntime", _ANY, scope="Cluster", status=False),
    ]


def _resource(at: int) -> Resource:
    return resources_of_definition(definitions(VERSIONS[-1])[at])[0]


JOB_SETS, TRAIN_JOBS, RUNTIMES, CLUSTER_RUNTIMES = (_resource(at) for at in range(4))
