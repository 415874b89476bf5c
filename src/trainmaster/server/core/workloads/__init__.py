"""Workload kinds: what a job runs, each kind one module, compiled into a launch that any backend takes.

A kind has a name `KIND`, a pydantic class `Spec`, and the functions `validate` and `compile`. To add one,
write such a module and `register` it; no backend, route or table changes.
"""

from trainmaster.server.core.workloads import (
    command,
    container,
    function,
    job_class,
    script,
    service,
    trainer,
    trainer_service,
)
from trainmaster.server.core.workloads.base import ShippedFile, WorkloadSpec, launch_of, spec_of
from trainmaster.server.core.workloads.registry import (
    AnyWorkload,
    WorkloadKind,
    compile_launch,
    effective_workload,
    kinds,
    module_for,
    register,
    unregister,
    validate_workload,
)

__all__ = [
    "AnyWorkload",
    "ShippedFile",
    "WorkloadKind",
    "WorkloadSpec",
    "compile_launch",
    "effective_workload",
    "kinds",
    "launch_of",
    "module_for",
    "register",
    "spec_of",
    "unregister",
    "validate_workload",
]

for _module in (command, container, function, job_class, script, service, trainer, trainer_service):
    register(_module)
