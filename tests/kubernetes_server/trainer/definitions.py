"""The custom resources of JobSet and of Trainer, with as much of their schemas as clients can see an effect of."""

from __future__ import annotations

from typing import Any

from kubernetes_server.objects import Object
from kubernetes_server.resources import Resource, resources_of_definition

TRAINER = "trainer.kubeflow.org"
JOBSET = "jobset.x-k8s.io"
VERSIONS = ("2.0", "2.1", "2.3")
"""Of Trainer: its TrainJobs differ in how they change the pods of their runtime."""
_ANY = {"x-kubernetes-preserve-unknown-fields": True}
_SPEC = ("runtimeRef", "initializer", "trainer", "suspend", "managedBy")
_POD = (
    "serviceAccountName", "nodeSelector", "affinity", "tolerations", "volumes", "initContainers", "containers",
    "schedulingGates", "imagePullSecrets", "securityContext",
)  # fmt: skip


def _object(*names: str, **fields: Object) -> Object:
    return {"type": "object", "properties": {**dict.fromkeys(names, _ANY), **fields}}


def _list(items: Object) -> Object:
    return {"type": "array", "items": items}


def _template(spec: Object) -> Object:
    return _object("metadata", spec=spec)


def _since(version: str) -> Object:
    """The fields of a TrainJob that are not in every version."""
    if version == "2.0":
        override = _object(
            "targetJobs", *(name for name in _POD if name not in ("imagePullSecrets", "securityContext"))
        )
        return {"labels": _ANY, "annotations": _ANY, "podSpecOverrides": _list(override)}
    if version == "2.1":
        override = _object("targetJobs", "metadata", spec=_object(*_POD))
        return {"labels": _ANY, "annotations": _ANY, "podTemplateOverrides": _list(override)}
    pods = _template(_object(*_POD, "terminationGracePeriodSeconds"))
    job = _object("name", template=_template(_object(template=pods)))
    runtime = _object(template=_template(_object(replicatedJobs=_list(job))))
    patch = _object("manager", "time", trainingRuntimeSpec=runtime)
    return {"runtimePatches": _list(patch), "activeDeadlineSeconds": _ANY}


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
    return [
        _definition(JOBSET, "v1alpha2", "JobSet", _ANY),
        _definition(TRAINER, "v1alpha1", "TrainJob", _object(*_SPEC, **_since(trainer_version))),
        _definition(TRAINER, "v1alpha1", "TrainingRuntime", _ANY, status=False),
        _definition(TRAINER, "v1alpha1", "ClusterTrainingRuntime", _ANY, scope="Cluster", status=False),
    ]


def _resource(at: int) -> Resource:
    return resources_of_definition(definitions(VERSIONS[-1])[at])[0]


JOB_SETS, TRAIN_JOBS, RUNTIMES, CLUSTER_RUNTIMES = (_resource(at) for at in range(4))
