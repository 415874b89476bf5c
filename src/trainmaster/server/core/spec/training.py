"""`training_config`: which model is trained, how, and with which framework."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, Strict, model_validator

from trainmaster.server.core.fields import (
    MAX_GPUS,
    Broken,
    Environment,
    Flag,
    Model,
    PathText,
    StringMap,
    Text,
    null_means,
    refuse,
)
from trainmaster.server.core.spec.resources import DEFAULT_PRIORITY, Priority, Retries
from trainmaster.server.core.training.sources import ModelSource
from trainmaster.server.core.training.types import FrameworkType, TrainingType


class Dtype(StrEnum):
    """The number format of the base model's weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class CollectiveBackend(StrEnum):
    """How ranks talk to each other."""

    NCCL = "nccl"
    GLOO = "gloo"
    MPI = "mpi"


class BaseModelConfig(Model):
    """The model to start from."""

    model_id: Text = Field(
        description="A Hugging Face name, a path, a URI (hf, s3, http, https, scaiatlas) or artifacts:JOB/output/model."
    )
    revision: Text | None = Field(default=None, description="Branch, tag or commit of the model.")
    source: ModelSource | None = Field(default=None, description="Where the model lies; null: as model_id says.")
    tokenizer_id: Text | None = Field(default=None, description="The tokenizer; the model's own when null.")
    dtype: Annotated[Dtype, null_means(Dtype.AUTO, Dtype)] = Field(
        default=Dtype.AUTO, description="Number format of the weights."
    )
    trust_remote_code: Flag = Field(default=False, description="Run code that comes with the model, if allowed here.")
    model_kwargs: StringMap = Field(default_factory=dict, description="Further arguments for loading the model.")


class DistributedConfig(Model):
    """How the training is spread over ranks."""

    world_size: Annotated[int, Strict(), Field(ge=1, le=MAX_GPUS)] | None = Field(
        default=None, description="Ranks over all nodes; must equal gpu_count where GPUs are used."
    )
    backend: CollectiveBackend = Field(
        default=CollectiveBackend.NCCL, description="How ranks talk to each other; gloo is used without a GPU."
    )
    strategy: Text | None = Field(default=None, description="Such as ddp, fsdp, zero1, zero2 or zero3.")
    config: StringMap = Field(default_factory=dict, description="Options of the strategy.")


class FrameworkConfig(Model):
    """What does the training."""

    type: FrameworkType = Field(default=FrameworkType.HF_TRAINER, description="The trainer; CUSTOM is your own script.")
    config: StringMap = Field(default_factory=dict, description="Options of the framework.")
    distributed: DistributedConfig = Field(
        default_factory=DistributedConfig, description="How the training is spread over ranks."
    )
    custom_script_path: PathText | None = Field(default=None, description="The script of a CUSTOM framework.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse(self._broken())
        return self

    def _broken(self) -> Iterator[Broken]:
        custom = self.type is FrameworkType.CUSTOM
        if custom and self.custom_script_path is None:
            yield Broken(("custom_script_path",), "required when the framework's type is CUSTOM")
        if not custom and self.custom_script_path is not None:
            message = f"only for a framework of type CUSTOM, not {self.type}; set the type, or leave this out"
            yield Broken(("custom_script_path",), message)


class TrainingConfig(Model):
    """Which model is trained, and how."""

    training_type: TrainingType = Field(description="What kind of training it is.")
    base_model: BaseModelConfig = Field(description="The model to start from.")
    framework: FrameworkConfig = Field(default_factory=FrameworkConfig, description="What does the training.")
    hyperparameters: StringMap = Field(
        default_factory=dict,
        description="Read by the table of the training type; a CUSTOM script gets them as they are.",
    )
    environment: Environment = Field(
        default_factory=dict,
        repr=False,
        description="Variables for the training process. Values are sealed, and never shown.",
    )
    resume_from_checkpoint: Text | None = Field(default=None, description="Id of a committed checkpoint to go on from.")
    max_retries: Retries = Field(default=0, description="The same as scheduling_config.max_retries.")
    priority: Priority = Field(default=DEFAULT_PRIORITY, description="The same as scheduling_config.priority.")
