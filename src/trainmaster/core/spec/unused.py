"""Fields that have no effect on the workload of a request: a submission that sets one is refused.

Stored specs are not checked: what an earlier version accepted can still be read.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainmaster.core.errors import Problem, SpecError
from trainmaster.core.spec.output import CheckpointConfig
from trainmaster.core.spec.submit import SubmitJobRequest
from trainmaster.core.workloads.trainer import is_training

_INSTEAD = {
    "training_config": "set variables in workload.environment, priority and max_retries in scheduling_config, and the "
    "checkpoint to start from in workload.resume_from_checkpoint; everything else is for the program's own arguments",
    "data_config": "pass the data to the program by its arguments, or fetch it with workload.initializers",
}
_SAVED_BY_TRAINERS = ("save_strategy", "save_steps", "save_on_each_node")


def refuse_unused(request: SubmitJobRequest) -> None:
    """Refuse what is set and would change nothing.

    Raises:
        SpecError: names every such field, and what to do instead.
    """
    problems = tuple(_unused_in_training(request) if is_training(request.workload) else _unused_beside(request))
    if problems:
        raise SpecError(problems)


def _unused_in_training(request: SubmitJobRequest) -> Iterator[Problem]:
    if request.workload is not None and request.workload.resume_from_checkpoint is not None:
        yield Problem(
            field="workload.resume_from_checkpoint",
            message="a training starts from training_config.resume_from_checkpoint; set it there",
        )


def _unused_beside(request: SubmitJobRequest) -> Iterator[Problem]:
    """What is set for a trainer, in a job whose workload is something else."""
    kind = request.workload.kind if request.workload is not None else ""
    for name, instead in _INSTEAD.items():
        if getattr(request, name) is not None:
            yield Problem(field=name, message=f"has no effect on a workload of kind {kind}: {instead}")
    checkpoint = request.output_config.checkpoint
    for name in _SAVED_BY_TRAINERS:
        if getattr(checkpoint, name) != CheckpointConfig.model_fields[name].default:
            yield Problem(
                field=f"output_config.checkpoint.{name}",
                message=f"has no effect on a workload of kind {kind}: the program decides when it saves; leave it out",
            )
