"""`SubmitJobRequest`: a declared job, as every door hands it in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from trainmaster.protocol.launch import Launch
from trainmaster.server.core.fields import (
    DNS_LABEL,
    MAX_RANKS_PER_NODE,
    NO_OTHER_KEYS,
    Matches,
    Name,
    RuledModel,
    RuleViolation,
    Scalar,
    must,
    optional,
)
from trainmaster.server.core.spec.configs import OutputConfig, ResourceConfig, SchedulingConfig, TrainingConfig
from trainmaster.server.core.spec.data import DataConfig
from trainmaster.server.core.training.types import FrameworkType, trains_adapter, unavailable
from trainmaster.server.core.workloads.base import AnyWorkload, WorkloadSpec
from trainmaster.server.core.workloads.programs import ScriptSpec
from trainmaster.server.core.workloads.trainer import (
    FETCH,
    TrainerSpec,
    check_shipped,
    configs_of,
    is_training,
    training_document,
    training_inputs,
)

_SHARED = WorkloadSpec.model_fields.keys() - {"kind"}
ConfigT = TypeVar("ConfigT", bound="TrainingConfig | DataConfig | None")

RESERVED_LABELS = ("system/", "type")
"""Labels that the server sets itself: everything below the first, and exactly the second."""
SHARED_FIELDS = frozenset({"priority", "max_retries"})
"""In training_config and in scheduling_config alike; a job has one value of each."""

LabelKey = Annotated[
    str,
    StringConstraints(min_length=1, max_length=63),
    Matches(r"[A-Za-z0-9._/-]+", "a label's key has letters, digits, '.', '_', '/' and '-'"),
    must(
        lambda key: not key.startswith(RESERVED_LABELS[0]) and key != RESERVED_LABELS[1],
        f"the label '{RESERVED_LABELS[1]}' and the prefix '{RESERVED_LABELS[0]}' are reserved; choose another",
    ),
]
LabelValue = Annotated[Scalar, Field(max_length=256)]
MAX_LABELS = 64
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=MAX_LABELS, json_schema_extra=NO_OTHER_KEYS)]
Handle = Annotated[str, DNS_LABEL]


class SubmitJobRequest(RuledModel):
    """A job: its name, what runs, and what it needs."""

    name: Name = Field(description="For people; need not be unique.")
    handle: Handle | None = optional("A name of your choice that is unique in your account.")
    labels: Labels = Field(default_factory=dict, description="Labels to filter jobs by.")
    workload: AnyWorkload | None = optional(
        "What runs; null: the training that training_config and data_config describe."
    )
    backend: Name | None = optional("The backend that runs the job; the server's default when null.")
    training_config: TrainingConfig | None = Field(
        default=None, validate_default=True, description="Which model is trained, and how. Required without a workload."
    )
    data_config: DataConfig | None = Field(
        default=None, validate_default=True, description="The training data. Required without a workload."
    )
    resource_config: ResourceConfig = Field(
        default_factory=ResourceConfig, description="What the job needs of its machines."
    )
    output_config: OutputConfig = Field(
        default_factory=OutputConfig, description="Where results go, and how checkpoints are kept."
    )
    scheduling_config: SchedulingConfig = Field(
        default_factory=SchedulingConfig, description="How the queue treats the job."
    )

    @property
    def resume_from_checkpoint(self) -> str | None:
        """The checkpoint that the first attempt starts from: the workload's, or the training's."""
        named = self.workload.resume_from_checkpoint if self.workload else None
        return named or (self.training_config.resume_from_checkpoint if self.training_config else None)

    @property
    def world_size(self) -> int:
        """Ranks over all nodes of a training: a job whose workload is left to its training_config."""
        training = self.training_config
        named = training.framework.distributed.world_size if training else None
        return named or self.resource_config.gpu_count or self.resource_config.node_count

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.resource_config.node_count

    @cached_property
    def training_document(self) -> Mapping[str, Any]:
        """The configuration for a training's processes: computed once, and used to check, admit and launch the job."""
        return training_document(self)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("training_document", None)  # it follows from the fields, which may be others now
        return copied

    @property
    def effective_workload(self) -> WorkloadSpec:
        """The workload that the request names, or that its training stands for: a trainer, or a CUSTOM script."""
        named = self.workload
        if named is not None and not is_training(named):
            return named
        shared = {name: getattr(named, name) for name in _SHARED} if named is not None else {}
        shared["ranks_per_node"] = self.ranks_per_node
        if (script := configs_of(self)[0].framework.custom_script_path) is not None:
            return ScriptSpec(kind="script", path=script).model_copy(update=shared)
        return TrainerSpec(kind="trainer").model_copy(update=shared)

    @property
    def runs_custom_script(self) -> bool:
        training = self.training_config
        return is_training(self.workload) and training is not None and training.framework.type is FrameworkType.CUSTOM

    def check_workload(self) -> None:
        """Check what the kind of the workload knows and its fields do not say; see `WorkloadSpec.check`."""
        workload = self.effective_workload
        if self.runs_custom_script:
            check_shipped(workload, self)
        else:
            workload.check(self)

    @field_validator("training_config", "data_config")
    @classmethod
    def _given_without_a_workload(cls, value: ConfigT, info: ValidationInfo) -> ConfigT:
        # A workload that is there but wrong is absent from info.data, and is reported for itself.
        if value is None and "workload" in info.data and is_training(info.data["workload"]):
            raise PydanticCustomError("rule", "required, unless a workload says what runs")
        return value

    def broken_rules(self) -> Iterator[RuleViolation]:
        training = self.training_config
        if training and is_training(self.workload) and unavailable(training.framework.type, training.training_type):
            return  # the workload's kind refuses it for that, beside which nothing else matters
        adapts = training is not None and trains_adapter(training.training_type, training.hyperparameters)
        if self.output_config.merge_lora and not adapts:
            yield RuleViolation(
                ("output_config", "merge_lora"), "only for the training types that train an adapter; leave it out"
            )
        if training is None:
            return
        scheduling = self.scheduling_config
        for name in sorted(scheduling.model_fields_set & training.model_fields_set & SHARED_FIELDS):
            canonical, alias = getattr(scheduling, name), getattr(training, name)
            if canonical != alias:
                message = f"is {alias}, but scheduling_config.{name} is {canonical}; set one of them"
                yield RuleViolation(("training_config", name), message)
        yield from self._broken_ranks(training)

    def _broken_ranks(self, training: TrainingConfig) -> Iterator[RuleViolation]:
        world_size = training.framework.distributed.world_size
        gpu_count, node_count = self.resource_config.gpu_count, self.resource_config.node_count
        field: tuple[str, ...] = ("training_config", "framework", "distributed", "world_size")
        if world_size is None:
            field = ("resource_config", "gpu_count")
        if world_size is not None and gpu_count and world_size != gpu_count:
            yield RuleViolation(
                field, f"is {world_size}, but resource_config.gpu_count is {gpu_count}; they must be equal"
            )
        elif world_size is not None and world_size % node_count:
            yield RuleViolation(field, f"must be divisible by resource_config.node_count ({node_count})")
        elif is_training(self.workload) and self.ranks_per_node > MAX_RANKS_PER_NODE:
            yield RuleViolation(field, f"gives {self.ranks_per_node} ranks on a node; the most is {MAX_RANKS_PER_NODE}")
        elif isinstance(self.workload, TrainerSpec) and self.workload.ranks_per_node not in (1, self.ranks_per_node):
            message = "follows from training_config.framework.distributed.world_size; leave it out"
            yield RuleViolation(("workload", "ranks_per_node"), message)

    @model_validator(mode="after")
    def _unify(self) -> Self:
        """Give both places of a shared field its one value, so that whoever reads either is right."""
        training, scheduling = self.training_config, self.scheduling_config
        if training is None:
            return self
        values = {
            name: getattr(scheduling if name in scheduling.model_fields_set else training, name)
            for name in SHARED_FIELDS
        }
        # The model is frozen for everybody else; it is still being made here.
        self.__dict__["training_config"] = training.model_copy(update=values)
        self.__dict__["scheduling_config"] = scheduling.model_copy(update=values)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledJob:
    """A request and what to run for it. Not stored: the stored request gives the same again."""

    request: SubmitJobRequest
    workload: WorkloadSpec
    """The effective one."""
    launch: Launch


def compile_job(request: SubmitJobRequest) -> CompiledJob:
    """Pure: the same request always gives the same launch."""
    workload = request.effective_workload
    launch = workload.compile(request)
    if request.runs_custom_script:
        # The script finds the same data and the same document as a built-in trainer.
        launch = replace(launch, steps=(FETCH, *launch.steps), inputs={**launch.inputs, **training_inputs(request)})
    return CompiledJob(request=request, workload=workload, launch=launch)
