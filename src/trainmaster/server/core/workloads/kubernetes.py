"""Options of a workload that only clusters of kind kubernetes take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from trainmaster.protocol.launch import KubernetesRequest
from trainmaster.server.core.fields import DNS_LABEL, JsonObject, Matches, Model, Text, must, optional

OWN_PREFIX = "trainmaster.io/"
NODE = "node"
"""The replicated job of a runtime that trains, and its container."""
_PREFIX = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?"
_NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_KEY = Annotated[
    str,
    Matches(_PREFIX + _NAME, "a key of Kubernetes has at most 63 letters, digits, '-', '_' and '.', after an optional "
    "domain and '/'"),
    must(lambda key: not key.startswith(OWN_PREFIX), f"keys below {OWN_PREFIX} are Trainmaster's; choose another"),
]  # fmt: skip
_VALUE = Annotated[
    str,
    Matches(f"({_NAME})?", "the value of a label of Kubernetes has at most 63 letters, digits, '-', '_' and '.'"),
]
_PATCHED = ("metadata", "spec")


class RuntimeKind(StrEnum):
    """Where a training runtime is."""

    CLUSTER_TRAINING_RUNTIME = "ClusterTrainingRuntime"  # in the cluster
    TRAINING_RUNTIME = "TrainingRuntime"  # in the namespace of the jobs


def _patches_pods_of_node(patch: Mapping[str, Any]) -> bool:
    """Whether it changes nothing but the pods that train."""
    if patch.keys() - {"manager", "time", "trainingRuntimeSpec"}:
        return False
    try:
        return all(each is not None for each in pod_patches([patch]))
    except (AttributeError, KeyError, TypeError):
        return False


def pod_patches(patches: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any] | None]:
    """What runtime patches change in the template of the pods that train; None for anything else."""
    for patch in patches:
        spec = dict((patch.get("trainingRuntimeSpec") or {}).get("template") or {})
        jobs = dict(spec.pop("spec", None) or {})
        for job in jobs.pop("replicatedJobs", None) or ():
            template = dict(job.get("template") or {})
            inner = dict(template.pop("spec", None) or {})
            pods = inner.pop("template", None) or {}
            only_pods = job.keys() <= {"name", "template"} and not template and not inner
            yield pods if only_pods and job["name"] == NODE and pods.keys() <= set(_PATCHED) else None
        if spec or jobs:
            yield None


class KubernetesOptions(Model):
    """Options of a job on a Kubernetes cluster."""

    runtime: Annotated[str, StringConstraints(max_length=63), DNS_LABEL] | None = optional(
        "A training runtime of the cluster. Where Kubeflow Trainer is installed, the job is a TrainJob with this "
        "runtime; otherwise, or when null, an Indexed Job."
    )
    runtime_kind: RuntimeKind = Field(
        default=RuntimeKind.CLUSTER_TRAINING_RUNTIME, description="The kind of the runtime."
    )
    labels: Annotated[dict[_KEY, _VALUE], Field(max_length=64)] = Field(
        default_factory=dict, description="Labels of the object that runs the job."
    )
    annotations: Annotated[dict[_KEY, Annotated[Text, Field(max_length=4096)]], Field(max_length=64)] = Field(
        default_factory=dict, description="Annotations of the object that runs the job."
    )
    runtime_patches: Annotated[
        tuple[
            Annotated[
                JsonObject,
                must(
                    _patches_pods_of_node,
                    f"must change nothing but the template of the pods of the replicated job '{NODE}': initializers "
                    "run in these pods, too",
                ),
            ],
            ...,
        ],
        Field(max_length=16),
    ] = Field(
        default=(),
        description="Changes to the template of the job's pods, as `runtimePatches` of a TrainJob has them; the "
        f"container is called `{NODE}`. Accounts other than the default one may choose nodes by them, and nothing "
        "else, unless the setting shared_uid allows it.",
    )

    def request(self) -> KubernetesRequest:
        """What of it a backend gets."""
        return KubernetesRequest(
            runtime=self.runtime,
            runtime_kind=str(self.runtime_kind),
            labels=self.labels,
            annotations=self.annotations,
            pod_patches=tuple(dict(each) for each in pod_patches(list(self.runtime_patches)) if each is not None),
        )
