"""What an option written for Kubeflow sets: `metadata` and `spec` of a TrainJob, as the job document has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainmaster.trainer.options.base import JobDocument, Option
from trainmaster.trainer.options.common import ActiveDeadlineSeconds, Annotations, Labels, Name
from trainmaster.trainer.options.containers import TrainerArgs, TrainerCommand

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
    """Put what an option has set of a TrainJob where the job document has it.

    Raises:
        ValueError: a field has no counterpart, or a wrong value.
    """
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
    """The fields that were set, by their paths."""
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
