"""Workload kinds: what a job runs, each kind one module, compiled into a launch that any backend takes.

A kind is a subclass of `WorkloadSpec`. To add one, write such a module and register its class below; no backend, route
or table changes.
"""

from trainmaster.server.core.workloads.base import (
    AnyWorkload,
    ShippedFile,
    WorkloadSpec,
    kinds,
    register,
    spec_for,
    unregister,
)
from trainmaster.server.core.workloads.function import FunctionSpec
from trainmaster.server.core.workloads.job_class import JobClassSpec
from trainmaster.server.core.workloads.programs import CommandSpec, ContainerSpec, ScriptSpec, ServiceSpec
from trainmaster.server.core.workloads.trainer import TrainerSpec
from trainmaster.server.core.workloads.trainer_service import TrainerServiceSpec

__all__ = ["AnyWorkload", "ShippedFile", "WorkloadSpec", "kinds", "register", "spec_for", "unregister"]

register(CommandSpec)
register(ContainerSpec)
register(FunctionSpec)
register(JobClassSpec)
register(ScriptSpec)
register(ServiceSpec)
register(TrainerSpec)
register(TrainerServiceSpec)
