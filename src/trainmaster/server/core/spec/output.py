"""`output_config`: where results go, how checkpoints are kept, and what is exported."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, SecretStr, ValidationInfo, model_validator

from trainmaster.server.core.fields import Broken, Count, Flag, Model, Text, null_means, refuse
from trainmaster.server.core.workloads.registry import STORED


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
        description="Checkpoints that are kept, the latest among them; at most 1000. The best, a pinned one and one in "
        "use are kept besides.",
    )
    metric_for_best_model: Text | None = Field(default=None, description="The metric that says which one is best.")
    greater_is_better: Flag | None = Field(
        default=None, description="Null: false for a metric with 'loss' in its name, else true."
    )
    save_on_each_node: Flag = Field(default=False, description="Every node saves, not the first alone.")
    resume_from_best: Flag = Field(default=False, description="Go on from the best checkpoint, not the latest.")

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        refuse(self._broken(is_new=info.context != STORED))
        return self

    def _broken(self, *, is_new: bool) -> Iterator[Broken]:
        if self.resume_from_best and self.metric_for_best_model is None:
            yield Broken(("metric_for_best_model",), "required with resume_from_best: it says which one is best")
        if is_new and self.save_total_limit > MAX_KEPT:
            message = f"must be at most {MAX_KEPT}; save less often, or pin the checkpoints that have to stay besides"
            yield Broken(("save_total_limit",), message)

    @property
    def best_is_greater(self) -> bool:
        """Whether a greater value of the metric is better."""
        if self.greater_is_better is not None:
            return self.greater_is_better
        return "loss" not in (self.metric_for_best_model or "").lower()


class OutputConfig(Model):
    """Where results go, how checkpoints are kept, and what is exported."""

    output_model_name: Text | None = Field(
        default=None, description="The name of the result below output_path; null: output_path itself is its place."
    )
    output_path: Text | None = Field(
        default=None, description="Where the result goes; a place of the server's if null."
    )
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="When checkpoints are saved, and which are kept."
    )
    push_to_hub: Flag = Field(default=False, description="Upload the result to the Hugging Face Hub at the end.")
    hub_repo_id: Text | None = Field(default=None, description="The repository to upload to.")
    hub_token: Annotated[SecretStr, Field(max_length=4096)] | None = Field(
        default=None, exclude=True, description="For models and data of the Hub that need one. Sealed, and never shown."
    )
    export_format: Annotated[ExportFormat, null_means(ExportFormat.SAFETENSORS, ExportFormat)] = Field(
        default=ExportFormat.SAFETENSORS, description="The form of the result."
    )
    merge_lora: Flag = Field(default=False, description="Merge the adapter into the base model; LORA and QLORA only.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refuse(self._broken())
        return self

    def _broken(self) -> Iterator[Broken]:
        if self.push_to_hub and self.hub_repo_id is None:
            yield Broken(("hub_repo_id",), "required with push_to_hub: it says where to upload")
