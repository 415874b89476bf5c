"""The configs of a job beside its data: `training_config`, `resource_config`, `scheduling_config`, `output_config`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, SecretStr, Strict, ValidationInfo, model_validator

from trainmaster.server.core.fields import (
    MAX_GPUS,
    MAX_NODES,
    STORED,
    Count,
    Environment,
    Flag,
    Matches,
    Model,
    Name,
    Names,
    Natural,
    PathText,
    RuledModel,
    RuleViolation,
    StringMap,
    Text,
    null_means,
    optional,
    refuse,
)
from trainmaster.server.core.training.sources import ModelSource
from trainmaster.server.core.training.types import SHARDED, FrameworkType, TrainingType


class SaveStrategy(StrEnum):
    """When checkpoints are saved."""

    STEPS = "steps"
    EPOCH = "epoch"


class ExportFormat(StrEnum):
    """In which form the trained model is written."""

    SAFETENSORS = "safetensors"
    PYTORCH = "pytorch"
    GGUF = "gguf"
    ADAPTER = "adapter"


MAX_KEPT = 1000
"""Checkpoints that a job may keep, beside pinned ones."""


class CheckpointConfig(Model):
    """When checkpoints are saved, and which are kept."""

    save_strategy: SaveStrategy = Field(default=SaveStrategy.STEPS, description="Count steps or epochs.")
    save_steps: Count = Field(default=500, description="Steps between checkpoints; not used with epochs.")
    save_total_limit: Count = Field(
        default=3,
        description="Number of newest checkpoints to keep; at most 1000. The best one, pinned ones and those in "
        "use are kept in addition.",
    )
    metric_for_best_model: Text | None = optional("The metric that determines the best checkpoint.")
    greater_is_better: Flag | None = optional("Null: false for a metric with 'loss' in its name, else true.")
    save_on_each_node: Flag = Field(default=False, description="Every node saves, not only the first.")
    resume_from_best: Flag = Field(
        default=False, description="Continue from the best checkpoint instead of the latest."
    )

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        refuse(self._broken(is_new=info.context != STORED))
        return self

    def _broken(self, *, is_new: bool) -> Iterator[RuleViolation]:
        if self.resume_from_best and self.metric_for_best_model is None:
            yield RuleViolation(("metric_for_best_model",), "required with resume_from_best: it says which one is best")
        if is_new and self.save_total_limit > MAX_KEPT:
            message = f"must be at most {MAX_KEPT}; save less often, or pin the checkpoints that have to stay besides"
            yield RuleViolation(("save_total_limit",), message)

    @property
    def best_is_greater(self) -> bool:
        if self.greater_is_better is not None:
            return self.greater_is_better
        return "loss" not in (self.metric_for_best_model or "").lower()


class OutputConfig(RuledModel):
    """Where results go, how checkpoints are kept, and what is exported."""

    output_model_name: Text | None = optional(
        "The result's name below output_path; null: the result goes to output_path itself."
    )
    output_path: Text | None = optional("Where the result goes; the server's own directory when null.")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="When checkpoints are saved, and which are kept."
    )
    push_to_hub: Flag = Field(default=False, description="Not available yet: upload the result to the Hub.")
    hub_repo_id: Text | None = optional("The repository for `push_to_hub`.")
    hub_token: Annotated[SecretStr, Field(max_length=4096)] | None = Field(
        default=None, exclude=True, description="For private models and data of the Hub. Encrypted, never shown."
    )
    export_format: Annotated[ExportFormat, null_means(ExportFormat.SAFETENSORS, ExportFormat)] = Field(
        default=ExportFormat.SAFETENSORS, description="The format of the result."
    )
    merge_lora: Flag = Field(default=False, description="Merge the adapter into the base model; LORA only.")

    def broken_rules(self) -> Iterator[RuleViolation]:
        if self.push_to_hub and self.hub_repo_id is None:
            yield RuleViolation(("hub_repo_id",), "required with push_to_hub: it says where to upload")


NodeLabel = Annotated[Name, Matches(r"[^=]+(=.*)?", "write a node label as 'key=value' or 'label'")]
NodeLabels = Annotated[tuple[NodeLabel, ...], Field(max_length=1024)]


class ResourceConfig(RuledModel):
    """What the job needs of its machines. Minima are requirements; affinities are preferences."""

    gpu_count: Annotated[int, Strict(), Field(ge=0, le=MAX_GPUS)] | None = optional(
        "GPUs over all nodes. Null: one per node if gpu_type or gpu_memory_min_mb is set or the backend "
        "has GPUs, else none. 0: runs on the CPU."
    )
    gpu_type: Name | None = optional("Such as H100 or A100-80GB; any when null.")
    gpu_memory_min_mb: Natural | None = optional("Minimum memory of each GPU.")
    cpu_cores: Count | None = optional("Cores to reserve on each node; also the limit there.")
    ram_min_mb: Natural | None = optional("Memory to reserve on each node; also the limit there.")
    storage_min_mb: Natural | None = optional("Disk space to reserve on each node.")
    node_affinity: NodeLabels = Field(default=(), description="Labels of nodes to prefer.")
    node_anti_affinity: NodeLabels = Field(default=(), description="Labels of nodes to avoid.")
    node_count: Annotated[int, Strict(), Field(ge=1, le=MAX_NODES)] = Field(
        default=1, description="Nodes of the gang; all of them run, or none."
    )

    @property
    def gpus_per_node(self) -> int | None:
        return None if self.gpu_count is None else self.gpu_count // self.node_count

    def broken_rules(self) -> Iterator[RuleViolation]:
        if self.gpu_count is not None and self.gpu_count % self.node_count:
            message = f"is the total over all nodes and must be divisible by node_count ({self.node_count})"
            yield RuleViolation(("gpu_count",), message)
        for index, label in enumerate(self.node_anti_affinity):
            if label in self.node_affinity:
                message = f"'{label}' is in node_affinity too; a node cannot be both preferred and avoided"
                yield RuleViolation(("node_anti_affinity", index), message)


DEFAULT_PRIORITY = 5
HIGHEST_PRIORITY = 10
Priority = Annotated[int, Strict(), Field(ge=0, le=HIGHEST_PRIORITY)]
Retries = Annotated[int, Strict(), Field(ge=0, le=100)]


class SchedulingConfig(Model):
    """How the queue treats the job."""

    queue: Name = Field(default="default", description="The queue that the job waits in.")
    priority: Priority = Field(default=DEFAULT_PRIORITY, description="0 to 10; jobs of higher priority start first.")
    preemptible: Flag = Field(default=False, description="May be preempted by a job of higher priority.")
    max_runtime_seconds: Count | None = optional(
        "Maximum running time of one attempt; time spent paused does not count."
    )
    required_capabilities: Names = Field(default=(), description="Tags that every node of the job must have.")
    allow_waiting_for_nodes: Flag = Field(
        default=False,
        description="Queue the job even if no node could ever hold it, until such nodes are added; otherwise it is "
        "refused.",
    )
    max_retries: Retries = Field(default=0, description="Automatic new attempts after transient failures.")


class Dtype(StrEnum):
    """The number format of the base model's weights."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class CollectiveBackend(StrEnum):
    """How ranks communicate."""

    NCCL = "nccl"
    GLOO = "gloo"
    MPI = "mpi"


class BaseModelConfig(Model):
    """The model to start from."""

    model_id: Text = Field(
        description="A Hugging Face name, a path, a URI (hf, s3, http, https, scaiatlas) or artifacts:JOB/output/model."
    )
    revision: Text | None = optional("Branch, tag or commit of the model.")
    source: ModelSource | None = optional("Where the model is; null: inferred from model_id.")
    tokenizer_id: Text | None = optional("The tokenizer; the model's own when null.")
    dtype: Annotated[Dtype, null_means(Dtype.AUTO, Dtype)] = Field(
        default=Dtype.AUTO, description="Number format of the weights."
    )
    trust_remote_code: Flag = Field(default=False, description="Run code that comes with the model, if allowed here.")
    model_kwargs: StringMap = Field(default_factory=dict, description="Further arguments for loading the model.")


class DistributedConfig(Model):
    """How the training is spread over ranks."""

    world_size: Annotated[int, Strict(), Field(ge=1, le=MAX_GPUS)] | None = optional(
        "Ranks over all nodes; must equal gpu_count if GPUs are used."
    )
    backend: CollectiveBackend = Field(
        default=CollectiveBackend.NCCL, description="How ranks communicate; gloo is used without a GPU."
    )
    strategy: Text | None = optional("How ranks have the model: a copy each (ddp) or a shard (fsdp, fsdp2). Null: ddp.")
    config: StringMap = Field(default_factory=dict, description="Options of the strategy.")


class FrameworkConfig(RuledModel):
    """The framework that trains."""

    type: FrameworkType = Field(
        default=FrameworkType.AUTO,
        description="The trainer: the engine, TRL (HF_TRAINER), or your own script (CUSTOM). AUTO is the engine "
        "wherever it has the model and the options, else TRL. FSDP is AUTO with distributed.strategy fsdp.",
    )
    config: StringMap = Field(default_factory=dict, description="Options of the framework.")
    distributed: DistributedConfig = Field(
        default_factory=DistributedConfig, description="How the training is spread over ranks."
    )
    custom_script_path: PathText | None = optional("The script of a CUSTOM framework.")

    @property
    def sharded(self) -> bool:
        """Whether each rank of a built-in trainer has a shard of the model, and not a copy."""
        return self.type is FrameworkType.FSDP or self.distributed.strategy in SHARDED

    def broken_rules(self) -> Iterator[RuleViolation]:
        custom = self.type is FrameworkType.CUSTOM
        if custom and self.custom_script_path is None:
            yield RuleViolation(("custom_script_path",), "required when the framework's type is CUSTOM")
        if not custom and self.custom_script_path is not None:
            message = f"only for a framework of type CUSTOM, not {self.type}; set the type, or leave this out"
            yield RuleViolation(("custom_script_path",), message)


class TrainingConfig(Model):
    """Which model is trained, and how."""

    training_type: TrainingType = Field(description="The kind of training.")
    base_model: BaseModelConfig = Field(description="The model to start from.")
    framework: FrameworkConfig = Field(default_factory=FrameworkConfig, description="The framework that trains.")
    hyperparameters: StringMap = Field(
        default_factory=dict,
        description="Checked against the table of the training type; a CUSTOM script gets them unchanged.",
    )
    environment: Environment = Field(
        default_factory=dict,
        repr=False,
        description="Variables for the training process. Values are encrypted and never shown.",
    )
    resume_from_checkpoint: Text | None = optional("Id of a committed checkpoint to continue from.")
    max_retries: Retries = Field(default=0, description="The same as scheduling_config.max_retries.")
    priority: Priority = Field(default=DEFAULT_PRIORITY, description="The same as scheduling_config.priority.")
