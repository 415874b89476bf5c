"""`RuntimePatch` and its parts: what it changes in the objects of a Kubernetes cluster, from the inside out.

Kubeflow has its other options here, too, and programs import them from here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

from trainmaster.protocol.launch import KUBERNETES
from trainmaster.trainer.options.common import (
    ActiveDeadlineSeconds,
    Annotations,
    JobDocument,
    Labels,
    Option,
    TrainerArgs,
    TrainerCommand,
    require,
)

__all__ = [
    "ActiveDeadlineSeconds",
    "Annotations",
    "ContainerPatch",
    "JobSetSpecPatch",
    "JobSetTemplatePatch",
    "JobSpecPatch",
    "JobTemplatePatch",
    "Labels",
    "PodSpecPatch",
    "PodTemplatePatch",
    "ReplicatedJobPatch",
    "RuntimePatch",
    "TrainerArgs",
    "TrainerCommand",
    "TrainingRuntimeSpecPatch",
]

VALUE_SOURCES = ("configMapKeyRef", "secretKeyRef", "fieldRef", "resourceFieldRef")


@dataclass(frozen=True)
class ContainerPatch:
    """A container, by its name."""

    name: str
    env: list[dict[str, Any]] | None = None
    volume_mounts: list[dict[str, Any]] | None = None
    security_context: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not _is_name(self.name):
            raise ValueError(f"ContainerPatch: name must be that of a container, not {self.name!r}")
        for variable in _entries("env", self.env):
            _check_variable(variable)
        for mount in _entries("volume_mounts", self.volume_mounts):
            path = mount.get("mountPath")
            if not isinstance(path, str) or not path.startswith("/"):
                raise ValueError(f"ContainerPatch: the mountPath of {mount['name']!r} must be an absolute path")


@dataclass(frozen=True)
class PodSpecPatch:
    """What a pod runs, and where."""

    service_account_name: str | None = None
    volumes: list[dict[str, Any]] | None = None
    init_containers: list[ContainerPatch] | None = None
    containers: list[ContainerPatch] | None = None
    image_pull_secrets: list[dict[str, Any]] | None = None
    security_context: dict[str, Any] | None = None
    node_selector: dict[str, str] | None = None
    affinity: dict[str, Any] | None = None
    tolerations: list[dict[str, Any]] | None = None
    scheduling_gates: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class PodTemplatePatch:
    metadata: dict[str, Any] | None = None
    spec: PodSpecPatch | None = None


@dataclass(frozen=True)
class JobSpecPatch:
    template: PodTemplatePatch | None = None


@dataclass(frozen=True)
class JobTemplatePatch:
    metadata: dict[str, Any] | None = None
    spec: JobSpecPatch | None = None


@dataclass(frozen=True)
class ReplicatedJobPatch:
    """One of the jobs of a job set, by its name: `node`, or an initializer."""

    name: str
    template: JobTemplatePatch | None = None


@dataclass(frozen=True)
class JobSetSpecPatch:
    replicated_jobs: list[ReplicatedJobPatch] | None = None


@dataclass(frozen=True)
class JobSetTemplatePatch:
    metadata: dict[str, Any] | None = None
    spec: JobSetSpecPatch | None = None


@dataclass(frozen=True)
class TrainingRuntimeSpecPatch:
    template: JobSetTemplatePatch | None = None


@dataclass(frozen=True)
class RuntimePatch(Option):
    """Changes to the pods that a job has in a Kubernetes cluster: those of the replicated job `node`, in which
    initializers run, too."""

    training_runtime_spec: TrainingRuntimeSpecPatch | None = None

    backends: ClassVar[tuple[str, ...]] = (KUBERNETES,)

    def __post_init__(self) -> None:
        spec = self.training_runtime_spec
        fine = spec is None or isinstance(spec, TrainingRuntimeSpecPatch)
        require(self, "training_runtime_spec", fine, "a TrainingRuntimeSpecPatch")

    def __call__(self, job_spec: JobDocument, trainer: object = None, backend: str | None = None) -> None:
        if backend is None:
            raise ValueError("the option RuntimePatch needs a kubernetes backend")
        super().__call__(job_spec, trainer, backend)

    def _change(self, job: JobDocument) -> None:
        patch = as_written(self)
        if patch:
            objects_of(job).setdefault("runtime_patches", []).append(patch)


def objects_of(job: JobDocument) -> JobDocument:
    """What a job says of its objects in a Kubernetes cluster."""
    found: JobDocument = job.setdefault("workload", {"kind": "trainer"}).setdefault("kubernetes", {})
    return found


def as_written(part: Any) -> Any:
    """As Kubernetes writes it, without what says nothing.

    >>> as_written(PodSpecPatch(service_account_name="a", node_selector={"a_b": "c"}, volumes=[]))
    {'serviceAccountName': 'a', 'nodeSelector': {'a_b': 'c'}}
    """
    if isinstance(part, list):
        return [as_written(each) for each in part]
    if not is_dataclass(part):
        return part
    values = ((_camel(each.name), as_written(getattr(part, each.name))) for each in fields(part))
    return {name: value for name, value in values if value not in (None, [], {})}


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def _check_variable(variable: dict[str, Any]) -> None:
    source = variable.get("valueFrom")
    if "value" not in variable and "valueFrom" not in variable:
        raise ValueError(f"ContainerPatch: the variable {variable['name']!r} must have a value or a valueFrom")
    if "valueFrom" in variable and not (isinstance(source, dict) and any(name in source for name in VALUE_SOURCES)):
        raise ValueError(
            f"ContainerPatch: valueFrom of {variable['name']!r} must hold one of {', '.join(VALUE_SOURCES)}"
        )


def _entries(field: str, given: object) -> list[dict[str, Any]]:
    entries = [] if given is None else given
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"ContainerPatch: {field} must be a list of dictionaries")
    for entry in entries:
        if not _is_name(entry.get("name")):
            raise ValueError(f"ContainerPatch: each entry of {field} must have a name")
    return entries


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
