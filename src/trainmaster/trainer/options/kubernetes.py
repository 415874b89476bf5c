"""`RuntimePatch` and its parts: what it changes in the objects of a Kubernetes cluster, from the inside out.
Below it, the fields of a TrainJob that options written for Kubeflow set.

Kubeflow has its other options here, too, and programs import them from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from trainmaster.trainer.options.common import (
    ActiveDeadlineSeconds,
    Annotations,
    JobDocument,
    Labels,
    Name,
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
    """Changes to the objects that a runtime makes in a Kubernetes cluster."""

    training_runtime_spec: TrainingRuntimeSpecPatch | None = None

    backends: ClassVar[tuple[str, ...]] = ("kubernetes",)

    def __post_init__(self) -> None:
        spec = self.training_runtime_spec
        fine = spec is None or isinstance(spec, TrainingRuntimeSpecPatch)
        require(self, "training_runtime_spec", fine, "a TrainingRuntimeSpecPatch")

    def _change(self, job: JobDocument) -> None:  # noqa: ARG002
        raise ValueError("the option RuntimePatch needs a kubernetes backend")


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


_FIELDS: Mapping[str, Callable[[Any], Option]] = {
    "metadata.name": Name,
    "metadata.labels": Labels,
    "metadata.annotations": Annotations,
    "spec.labels": Labels,
    "spec.annotations": Annotations,
    "spec.activeDeadlineSeconds": ActiveDeadlineSeconds,
    "spec.trainer.command": TrainerCommand,
    "spec.trainer.args": TrainerArgs,
}
"""Fields of a TrainJob, and the options that ask for the same."""
_REMEDIES = {
    "spec.trainer.image": "give the image to the trainer",
    "spec.trainer.numNodes": "give num_nodes to the trainer",
    "spec.trainer.resourcesPerNode": "give resources_per_node to the trainer",
    "spec.suspend": "suspend_job() does that to a job that runs",
    "spec.runtimePatches": "it changes the objects of a Kubernetes cluster",
}
_ENVIRONMENT = "spec.trainer.env"


def take_train_job_fields(job: JobDocument, trainer: object, backend: str | None) -> None:
    """Put what an option has set of a TrainJob where the job document has it; ValueError: it has no such place."""
    set_by_option: dict[str, Any] = {name: job.pop(name) for name in ("metadata", "spec") if name in job}
    for path, value in _leaves(set_by_option):
        if value is None:
            continue
        if path in _FIELDS:
            _FIELDS[path](value)(job, trainer, backend)
        elif path == _ENVIRONMENT:
            environment_of(job).update(_variables(value))
        else:
            remedy = f": {_REMEDIES[path]}" if path in _REMEDIES else ""
            raise ValueError(f"an option sets {path} of a TrainJob, which has no counterpart here{remedy}")


def _leaves(fields: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        place = f"{path}.{name}" if path else name
        if place in ("metadata", "spec", "spec.trainer"):
            if not isinstance(value, Mapping):
                raise ValueError(f"an option sets {place} of a TrainJob to {value!r}; it must have fields")
            yield from _leaves(value, place)
        else:
            yield place, value


def environment_of(job: JobDocument) -> dict[str, str]:
    """The variables of the job, which a built-in trainer has elsewhere than others."""
    place = job["training_config"] if "training_config" in job else job["workload"]
    found: dict[str, str] = place.setdefault("environment", {})
    return found


def _variables(entries: object) -> Iterator[tuple[str, str]]:
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("value"), str) or not entry.get("name"):
            raise ValueError(f"an option sets a variable of {_ENVIRONMENT} to {entry!r}; it needs a name and a value")
        yield str(entry["name"]), entry["value"]
