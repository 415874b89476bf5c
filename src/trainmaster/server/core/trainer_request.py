"""A trainer that a client of the Fireworks door requests, as a job submission: on a training shape, which nothing of
the request may override; placed by hand; or on the smallest shape that is good enough. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainmaster.server.core.errors import Problem, RefusedError
from trainmaster.server.core.resources import REGION
from trainmaster.server.core.shapes import ChosenShape, ShapeMode, Shapes, ShapeVersion
from trainmaster.server.core.spec.documents import parse_submit
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.workloads.trainer_service import KIND

PURPOSE = "purpose"
MANAGED_BY = "managed_by"
"""Labels of the job that hold what the client says of it."""

_PASSED_ON = (
    "base_model", "lora_rank", "learning_rate", "gradient_accumulation_steps", "forward_only", "extra_args",
    "inactivity_timeout_s", "disable_inactivity_cleanup",
)  # fmt: skip
"""Fields that a trainer's workload has by the same names."""
_ACCELERATOR = re.compile(r"(?:NVIDIA|AMD)_([A-Z0-9]+)(?:_([0-9]+)GB)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedTrainer:
    job_id: str
    base_model: str
    lora_rank: int = 0
    learning_rate: float | None = None
    gradient_accumulation_steps: int = 1
    max_context_length: int | None = None
    forward_only: bool = False
    extra_args: tuple[str, ...] = ()
    display_name: str | None = None
    inactivity_timeout_s: float = 0.0
    disable_inactivity_cleanup: bool = False
    preemptible: bool = False
    purpose: str | None = None
    managed_by: str | None = None
    reservation_target: str | None = None
    replica_count: int = 1
    # Where it runs: by hand alone.
    region: str | None = None
    accelerator_type: str | None = None
    accelerator_count: int | None = None
    node_count: int | None = None
    custom_image_tag: str | None = None


def by_hand(wanted: WantedTrainer) -> SubmitJobRequest:
    """The job of a trainer whose client says itself where it runs; RefusedError if it names an image."""
    if wanted.custom_image_tag is not None:
        message = "trainers run with the packages of this server, and in no image of their own; leave it out"
        raise RefusedError.because([Problem(field="trainingConfig.customImageTag", message=message)])
    kind, count = wanted.accelerator_type, wanted.accelerator_count
    if count is None and kind is not None:
        count = 1
    return _request(
        wanted,
        _resources(wanted, accelerator_type=kind, count=count, node_count=wanted.node_count or 1),
        region=wanted.region,
        workload={"max_context_length": wanted.max_context_length, "accelerator_type": kind},
    )


def on_shape(
    wanted: WantedTrainer, chosen: ChosenShape, *, account_id: str, chosen_by_us: bool = False
) -> SubmitJobRequest:
    """The job of a trainer on a training shape; RefusedError if it overrides the shape, or the shape is not for it.
    With `chosen_by_us` the client left the choice to the server, so that its placement fields were the criteria."""
    version = chosen.version
    if problems := [*_not_for(wanted, version), *(() if chosen_by_us else _overriding(wanted, version))]:
        raise RefusedError.because(problems)
    kind, count = version.accelerator_type, version.accelerator_count
    resources = _resources(wanted, accelerator_type=kind, count=count, node_count=version.node_count)
    if version.cpu_cores is not None:
        resources["cpu_cores"] = version.cpu_cores
    return _request(
        wanted,
        resources,
        region=version.region or wanted.region,
        workload={
            "max_context_length": wanted.max_context_length or version.max_context_length,
            "accelerator_type": kind,
            "precision": version.precision,
            "sampling_share": version.sampling_share,
            "training_shape": chosen.name_for(account_id),
        },
    )


def choose_shape(wanted: WantedTrainer, shapes: Shapes, *, gpus: bool) -> ChosenShape | None:
    """The smallest shape that is good enough, where the client leaves the choice to the server; None when none is. With
    `gpus` there are GPUs, and trainers belong there. A shape without a region or an image tag suits any."""
    fitting = [
        ChosenShape(shape=shape.name, version=latest)
        for shape in shapes
        if (latest := shape.latest) is not None
        and (latest.accelerator_count > 0) == gpus
        and (wanted.region is None or latest.region in (None, wanted.region))
        and (wanted.custom_image_tag is None or latest.image_tag in (None, wanted.custom_image_tag))
        and not any(_not_for(wanted, latest))
    ]
    return min(fitting, key=_size, default=None)


def _size(chosen: ChosenShape) -> tuple[int, int, bool, str]:
    version = chosen.version
    accelerators = version.accelerator_count * version.node_count
    # Of equals, one that is for this very model, and then any order that is always the same.
    return accelerators, version.max_context_length, not version.base_models, chosen.shape


def accelerator(name: str) -> tuple[str, int | None]:
    """A GPU's type and least memory in MB by the name that a client has for it.

    >>> accelerator("NVIDIA_H100_80GB"), accelerator("H200")
    (('H100', 76293), ('H200', None))
    """
    if (found := _ACCELERATOR.fullmatch(name)) is None:
        return name, None
    # A maker's GB are 10^9 bytes, and drivers keep some for themselves.
    return found[1], int(found[2]) * 10**9 >> 20 if found[2] else None


def _resources(
    wanted: WantedTrainer, *, accelerator_type: str | None, count: int | None, node_count: int
) -> dict[str, Any]:
    # Each replica has nodes of its own.
    nodes = node_count * wanted.replica_count
    resources: dict[str, Any] = {"node_count": nodes, "gpu_count": None if count is None else count * nodes}
    if accelerator_type is not None:
        resources["gpu_type"], resources["gpu_memory_min_mb"] = accelerator(accelerator_type)
    return resources


def _request(
    wanted: WantedTrainer, resources: dict[str, Any], *, region: str | None, workload: dict[str, Any]
) -> SubmitJobRequest:
    labels = {PURPOSE: wanted.purpose, MANAGED_BY: wanted.managed_by}
    return parse_submit(
        {
            "name": wanted.display_name or wanted.job_id,
            "handle": wanted.job_id,
            "labels": {name: value for name, value in labels.items() if value},
            "workload": {
                "kind": KIND,
                **{name: getattr(wanted, name) for name in _PASSED_ON},
                **workload,
            },
            "resource_config": resources,
            "scheduling_config": {
                "preemptible": wanted.preemptible,
                "required_capabilities": [f"{REGION}{region}"] if region else [],
                **({"queue": wanted.reservation_target} if wanted.reservation_target else {}),
            },
        }
    )


def _not_for(wanted: WantedTrainer, version: ShapeVersion) -> Iterator[Problem]:
    field = "trainingShape"
    if version.unusable is not None:
        yield Problem(field=field, message=f"cannot be honoured: {version.unusable}")
    if version.trainer_mode is ShapeMode.FORWARD_ONLY and not wanted.forward_only:
        message = "the shape is for forward passes alone; set forward_only, or take another shape"
        yield Problem(field=field, message=message)
    if version.trainer_mode is ShapeMode.POLICY and wanted.lora_rank:
        message = "the shape is for training the weights themselves; set lora_rank to 0, or take another shape"
        yield Problem(field=field, message=message)
    if version.base_models and wanted.base_model not in version.base_models:
        yield Problem(
            field=field, message=f"is not for {wanted.base_model}; it is for {', '.join(version.base_models)}"
        )
    if wanted.max_context_length is not None and wanted.max_context_length > version.max_context_length:
        message = f"is {wanted.max_context_length}, and the shape has {version.max_context_length}"
        yield Problem(field="trainingConfig.maxContextLength", message=message)


def _overriding(wanted: WantedTrainer, version: ShapeVersion) -> Iterator[Problem]:
    said = {
        # A shape that is for no region in particular leaves that to the client.
        "trainingConfig.region": (wanted.region, version.region or wanted.region),
        "trainingConfig.acceleratorType": (wanted.accelerator_type, version.accelerator_type),
        "trainingConfig.acceleratorCount": (wanted.accelerator_count, version.accelerator_count),
        "trainingConfig.customImageTag": (wanted.custom_image_tag, version.image_tag),
        "nodeCount": (wanted.node_count, version.node_count),
    }
    for field, (asked, given) in said.items():
        if asked is not None and asked != given:
            yield Problem(field=field, message="comes from the training shape and cannot be overridden; leave it out")
