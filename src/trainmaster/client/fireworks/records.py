"""What the server's answers say, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
