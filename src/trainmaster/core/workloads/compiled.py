"""From a job's request to its workload and its launch, whatever the kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainmaster.core.errors import RefusedError
from trainmaster.core.workloads.base import WorkloadSpec
from trainmaster.core.workloads.registry import module_for
from trainmaster.core.workloads.script import ScriptSpec
from trainmaster.protocol.launch import Launch

if TYPE_CHECKING:
    from trainmaster.core.spec.submit import SubmitJobRequest


def effective_workload(request: SubmitJobRequest) -> WorkloadSpec:
    """The workload that a request names, or the script that its CUSTOM framework stands for.

    Raises:
        RefusedError: the request asks for a built-in trainer.
    """
    if request.workload is not None:
        return request.workload
    if request.training_config is None:
        raise ValueError("a request has a workload or a training_config")
    framework = request.training_config.framework
    if framework.custom_script_path is None:
        raise RefusedError(
            f"built-in trainers are not available in this version (framework {framework.type}); use framework type "
            "CUSTOM with custom_script_path, or give an explicit workload"
        )
    return ScriptSpec(kind="script", path=framework.custom_script_path, ranks_per_node=request.ranks_per_node)


def validate_workload(request: SubmitJobRequest) -> None:
    """Check what the workload's kind knows and its fields do not say.

    Raises:
        SpecError: something is wrong with it.
        RefusedError: it asks for something that is not available.
    """
    workload = effective_workload(request)
    if request.workload is not None:
        module_for(workload.kind).validate(request)


def compile_launch(request: SubmitJobRequest) -> Launch:
    """What to run. Pure: the same request always gives the same launch."""
    workload = effective_workload(request)
    if request.workload is None:
        request = request.model_copy(update={"workload": workload})
    return module_for(workload.kind).compile(request)
