"""Workload kinds: what a job runs, compiled into a launch that any backend takes. To add one, write a subclass of
`WorkloadSpec` and register it below; no backend, route or table changes."""

from trainmaster.server.core.workloads.base import WorkloadSpec, kinds, register, spec_for, unregister
from trainmaster.server.core.workloads.function import FunctionSpec
from trainmaster.server.core.workloads.job_class import JobClassSpec
from trainmaster.server.core.workloads.programs import CommandSpec, ContainerSpec, ScriptSpec, ServiceSpec
from trainmaster.server.core.workloads.trainer import TrainerSpec
from trainmaster.server.core.workloads.trainer_service import TrainerServiceSpec

__all__ = ["WorkloadSpec", "kinds", "register", "spec_for", "unregister"]

for _spec in (CommandSpec, ContainerSpec, FunctionSpec, JobClassSpec, ScriptSpec, ServiceSpec):
    register(_spec)
register(TrainerSpec)
register(TrainerServiceSpec)
