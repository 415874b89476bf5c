"""The values of the SDK: the configuration of a trainer job, and what the server answers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class CreatedTrainerJob:
    """A trainer job that was just created."""

    job_name: str
    """accounts/ACCOUNT/rlorTrainerJobs/JOB"""
    job_id: str


@dataclass(frozen=True, slots=True)
class TrainerServiceEndpoint:
    """A trainer that answers."""

    job_name: str
    """accounts/ACCOUNT/rlorTrainerJobs/JOB"""
    job_id: str
    base_url: str
    """Where a training client connects."""
    max_context_length: int | None = None


@dataclass(frozen=True, slots=True)
class TrainingShapeProfile:
    """What a version of a training shape stands for."""

    training_shape_version: str
    """Its full name, for `TrainerJobConfig.training_shape_ref`."""
    trainer_image_tag: str
    max_supported_context_length: int
    node_count: int
    deployment_shape_version: str
    deployment_image_tag: str
    accelerator_type: str
    accelerator_count: int
    base_model_weight_precision: str
    pipeline_parallelism: int
    trainer_mode: str = ""
    """POLICY_TRAINER, LORA_TRAINER or FORWARD_ONLY."""

    @property
    def training_shape(self) -> str:
        """The full name of the shape, whichever its version."""
        return self.training_shape_version.partition("/versions/")[0]

    @property
    def deployment_shape(self) -> str | None:
        """The version of the deployment shape that goes with it."""
        return self.deployment_shape_version or None

    @property
    def supports_lora(self) -> bool:
        """Whether it trains adapters."""
        return self.trainer_mode == "LORA_TRAINER"

    @classmethod
    def from_version(cls, version: Mapping[str, Any]) -> Self:
        """Read a training shape's version as the server sends it."""
        snapshot = version.get("snapshot") or {}
        sharding = snapshot.get("trainerShardingScheme") or {}
        return cls(
            training_shape_version=version.get("name", ""),
            trainer_image_tag=snapshot.get("trainerImageTag", ""),
            max_supported_context_length=snapshot.get("maxSupportedContextLength", 0),
            node_count=snapshot.get("nodeCount", 1),
            deployment_shape_version=snapshot.get("deploymentShapeVersion", ""),
            deployment_image_tag=snapshot.get("deploymentImageTag", ""),
            accelerator_type=snapshot.get("acceleratorType", ""),
            accelerator_count=snapshot.get("acceleratorCount", 0),
            base_model_weight_precision=snapshot.get("baseModelWeightPrecision", ""),
            pipeline_parallelism=sharding.get("pipelineParallelism", 1),
            trainer_mode=snapshot.get("trainerMode", ""),
        )


SHAPE_NAME = re.compile(r"accounts/[^/]+/trainingShapes/[^/]+(/versions/[^/]+)?")
DURATION = re.compile(r"\d+(\.\d{1,9})?s")
"""A protobuf duration as JSON, such as 1800s."""
OWNED_BY_SHAPES = ("accelerator_type", "accelerator_count", "node_count", "custom_image_tag")
LONGEST_DISPLAY_NAME = 63


@dataclass(slots=True)
class TrainerJobConfig:
    """A trainer job, on a training shape (`training_shape_ref`) or, without one, on what its own fields say."""

    base_model: str
    lora_rank: int = 0
    """0 trains all parameters, a positive rank an adapter."""
    max_context_length: int | None = None
    learning_rate: float = 1e-5
    """What an optimizer step uses when it names none."""
    gradient_accumulation_steps: int | None = None
    """So many optimizer steps are taken as one."""
    node_count: int | None = None
    display_name: str | None = None
    hot_load_deployment_id: str | None = None
    region: str | None = None
    custom_image_tag: str | None = None
    extra_args: list[str] | None = None
    accelerator_type: str | None = None
    accelerator_count: int | None = None
    training_shape_ref: str | None = None
    """The full name of a training shape or a version of one; `resolve_training_profile` tells it."""
    forward_only: bool = False
    """A frozen model, such as a reference."""
    inactivity_timeout: timedelta | str | None = None
    """After so long without a request or a heartbeat the trainer saves and stops; unset or 0 means an hour."""
    disable_inactivity_cleanup: bool = False
    skip_validations: bool = False
    requested_job_id: str | None = None
    """The id that the job gets. Creating it again returns the one that is there."""

    def validate(self) -> None:
        """See whether it makes sense, as far as that can be seen from here.

        Raises:
            ValueError: it does not; says everything that is wrong.
        """
        problems = list(self._problems())
        if problems:
            raise ValueError("\n".join(problems))

    def query(self, job_id: str) -> dict[str, str]:
        """The query of the request that creates it."""
        query = {"rlorTrainerJobId": job_id}
        if self.training_shape_ref:
            query["trainingShape"] = self.training_shape_ref
        if self.hot_load_deployment_id:
            query["deploymentId"] = self.hot_load_deployment_id
        # Without a shape there is nothing to check the fields against; asking for neither lets the server choose one.
        if self.skip_validations or not self.training_shape_ref:
            query["skipValidations"] = "true"
        return query

    def body(self) -> dict[str, Any]:
        """The body of the request that creates it."""
        training = {
            "baseModel": self.base_model,
            "loraRank": self.lora_rank,
            "learningRate": self.learning_rate,
            "maxContextLength": self.max_context_length,
            "gradientAccumulationSteps": self.gradient_accumulation_steps,
            "customImageTag": self.custom_image_tag,
            "acceleratorType": self.accelerator_type,
            "acceleratorCount": self.accelerator_count,
            "region": self.region,
            "extraArgs": self.extra_args,
        }
        body = {
            "serviceMode": True,
            "trainingConfig": _given(training),
            "nodeCount": self.node_count or (None if self.training_shape_ref else 1),
            "displayName": self.display_name,
            "hotLoadDeploymentId": self.hot_load_deployment_id,
            "forwardOnly": self.forward_only or None,
            "inactivityTimeout": None if self.inactivity_timeout is None else _duration(self.inactivity_timeout),
            "disableInactivityCleanup": self.disable_inactivity_cleanup or None,
        }
        return _given(body)

    def _problems(self) -> Iterator[str]:
        if not self.base_model:
            yield "base_model is required"
        if self.lora_rank < 0:
            yield "lora_rank must be 0, for all parameters, or more"
        if self.gradient_accumulation_steps is not None and self.gradient_accumulation_steps < 1:
            yield "gradient_accumulation_steps must be 1 or more"
        if self.display_name is not None and len(self.display_name) > LONGEST_DISPLAY_NAME:
            yield f"display_name must have at most {LONGEST_DISPLAY_NAME} characters"
        if self.inactivity_timeout is not None:
            try:
                _duration(self.inactivity_timeout)
            except ValueError as error:
                yield f"inactivity_timeout {error}"
        if self.training_shape_ref:
            if not SHAPE_NAME.fullmatch(self.training_shape_ref):
                yield (
                    f"training_shape_ref {self.training_shape_ref!r} is not the full name of a training shape "
                    "(accounts/ACCOUNT/trainingShapes/SHAPE[/versions/VERSION]); resolve_training_profile tells it"
                )
            for field in OWNED_BY_SHAPES:
                if getattr(self, field):
                    yield f"{field} is the training shape's to say, and cannot be set beside training_shape_ref"


def _duration(value: timedelta | str) -> str:
    if isinstance(value, timedelta):
        value = f"{value.total_seconds():f}".rstrip("0").rstrip(".") + "s"
    if not DURATION.fullmatch(value):
        raise ValueError(f"must be a timedelta of 0 or more, or a number of seconds such as '1800s', not {value!r}")
    return value


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
