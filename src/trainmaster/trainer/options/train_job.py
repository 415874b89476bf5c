"""Where a job document has the fields of a TrainJob: those that options written for Kubeflow set, and what a job on a
Kubernetes cluster says of its own TrainJob."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainmaster.protocol.launch import KUBERNETES
from trainmaster.trainer.options.common import (
    ANNOTATION_PREFIX,
    ActiveDeadlineSeconds,
    Annotations,
    JobDocument,
    Labels,
    Name,
    Option,
    TrainerArgs,
    TrainerCommand,
)
from trainmaster.trainer.options.kubernetes import objects_of
from trainmaster.trainer.runtimes.document import PREFIX, TrainingRuntime

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
_PATCHES = "spec.runtimePatches"


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
        elif path == _PATCHES and backend == KUBERNETES:
            objects_of(job).setdefault("runtime_patches", []).extend(value if isinstance(value, list) else [value])
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


def add_objects(job: JobDocument, runtime: TrainingRuntime) -> None:
    """Say of a job on a Kubernetes cluster of which runtime it is a TrainJob, and give that the job's own labels."""
    if runtime.in_cluster:
        objects_of(job).update(runtime=runtime.name, runtime_kind=str(runtime.kind.value))
    own = {key: value for key, value in job["labels"].items() if not key.startswith(PREFIX)}
    notes = {key: value for key, value in own.items() if key.startswith(ANNOTATION_PREFIX)}
    if labels := {key: value for key, value in own.items() if key not in notes}:
        objects_of(job)["labels"] = labels
    if notes:
        objects_of(job)["annotations"] = {key.removeprefix(ANNOTATION_PREFIX): value for key, value in notes.items()}


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
