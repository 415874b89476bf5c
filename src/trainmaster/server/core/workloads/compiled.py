"""From a job's request to its workload and its launch, whatever the kind."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trainmaster.protocol.launch import Launch
from trainmaster.server.core.training.document import TRAINING_FILE, training_text
from trainmaster.server.core.training.types import FrameworkType
from trainmaster.server.core.workloads.base import WorkloadSpec
from trainmaster.server.core.workloads.registry import module_for
from trainmaster.server.core.workloads.script import ScriptSpec
from trainmaster.server.core.workloads.trainer import FETCH, TrainerSpec, check_shipped, configs_of, is_training

if TYPE_CHECKING:
    from trainmaster.server.core.spec.submit import SubmitJobRequest

_SHARED = WorkloadSpec.model_fields.keys() - {"kind"}


def effective_workload(request: SubmitJobRequest) -> WorkloadSpec:
    """The workload that a request names, or the one that its training stands for: a trainer, or a CUSTOM script."""
    named = request.workload
    if named is not None and not is_training(named):
        return named
    framework = configs_of(request)[0].framework
    shared = {name: getattr(named, name) for name in _SHARED} if named is not None else {}
    shared["ranks_per_node"] = request.ranks_per_node
    if framework.custom_script_path is not None:
        return ScriptSpec(kind="script", path=framework.custom_script_path).model_copy(update=shared)
    return TrainerSpec(kind="trainer").model_copy(update=shared)


def validate_workload(request: SubmitJobRequest) -> None:
    """Check what the workload's kind knows and its fields do not say.

    Raises:
        SpecError: something is wrong with it.
        RefusedError: it asks for something that is not available.
    """
    if _is_custom(request):
        check_shipped(request)
    else:
        workload = effective_workload(request)
        module_for(workload.kind).validate(_running(request, workload))


def compile_launch(request: SubmitJobRequest) -> Launch:
    """What to run. Pure: the same request always gives the same launch."""
    workload = effective_workload(request)
    launch = module_for(workload.kind).compile(_running(request, workload))
    if not _is_custom(request):
        return launch
    inputs = {**launch.inputs, TRAINING_FILE: training_text(request)}
    return replace(launch, steps=(FETCH, *launch.steps), inputs=inputs)


def _running(request: SubmitJobRequest, workload: WorkloadSpec) -> SubmitJobRequest:
    return request if request.workload is workload else request.model_copy(update={"workload": workload})


def _is_custom(request: SubmitJobRequest) -> bool:
    training = request.training_config
    return is_training(request.workload) and training is not None and training.framework.type is FrameworkType.CUSTOM
