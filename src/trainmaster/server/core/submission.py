"""Making new jobs: from a request, or as the child of one that ended."""

from __future__ import annotations

import random
import secrets
import string
from collections.abc import Mapping
from typing import Any

from trainmaster.server.core.commands import check_allowed
from trainmaster.server.core.errors import Problem, SpecError
from trainmaster.server.core.job import Change, Event, Job
from trainmaster.server.core.resources import Needs
from trainmaster.server.core.spec.configs import ResourceConfig
from trainmaster.server.core.spec.documents import SPEC_VERSION, dump, load_stored
from trainmaster.server.core.spec.parse import parse
from trainmaster.server.core.spec.submit import CompiledJob, SubmitJobRequest
from trainmaster.server.core.states import TRANSITIONS, Action, Trigger
from trainmaster.server.core.workloads.service import Serving

_ALPHABET = string.digits + string.ascii_lowercase
# Seeded once from the system: an id must be unique, not secret, and asking the kernel for each one costs time.
_ids = random.Random(secrets.token_bytes(32))


def new_job_id() -> str:
    """An id that nobody has: short enough to type, long enough (62 bits) to be alone."""
    return f"job-{''.join(_ids.choices(_ALPHABET, k=12))}"


def submit(
    compiled: CompiledJob,
    *,
    account_id: str,
    job_id: str,
    created_by: str,
    now: float,
    default_backend: str,
    parent: Job | None = None,
) -> Change:
    """The record of a new job, PENDING."""
    request, workload, launch = compiled.request, compiled.workload, compiled.launch
    checkpoint = request.output_config.checkpoint
    edge = TRANSITIONS[None, Trigger.SUBMIT]
    job = Job(
        account_id=account_id,
        job_id=job_id,
        handle=request.handle,
        name=request.name,
        labels=dict(request.labels),
        created_by=created_by,
        created_at=now,
        parent_job_id=parent.job_id if parent else None,
        root_job_id=parent.root_job_id if parent else job_id,
        spec_version=SPEC_VERSION,
        spec=dump(request),
        workload_kind=workload.kind,
        lifetime=launch.lifetime,
        backend=request.backend or default_backend,
        queue=request.scheduling_config.queue,
        priority=request.priority,
        needs=needs_of(request),
        max_retries=request.max_retries,
        preemptible=request.scheduling_config.preemptible,
        max_runtime_s=request.scheduling_config.max_runtime_seconds,
        inactivity_timeout_s=workload.effective_inactivity_s if isinstance(workload, Serving) else None,
        best_metric=checkpoint.metric_for_best_model,
        best_is_greater=checkpoint.best_is_greater,
        can_save=bool(launch.can_save),
        resume_checkpoint_id=request.resume_from_checkpoint,
        status=edge.to,
        event_count=1,
        updated_at=now,
        status_at=now,
    )
    event = Event(
        job_id=job_id,
        seq=1,
        at=now,
        type="status",
        actor=edge.actor,
        attempt=0,
        to_status=edge.to,
        message=f"made by a retry of {parent.job_id}" if parent else "the job was submitted",
    )
    return Change(job=job, events=(event,))


def needs_of(request: SubmitJobRequest) -> Needs:
    """What a request asks of each node."""
    resources = request.resource_config
    return Needs(
        node_count=resources.node_count,
        gpus_per_node=resources.gpus_per_node,
        gpu_type=resources.gpu_type,
        gpu_memory_min_mb=resources.gpu_memory_min_mb or 0,
        cpu_cores=resources.cpu_cores or 0,
        ram_mb=resources.ram_min_mb or 0,
        storage_mb=resources.storage_min_mb or 0,
        capabilities=tuple(request.scheduling_config.required_capabilities),
        affinity=tuple(resources.node_affinity),
        anti_affinity=tuple(resources.node_anti_affinity),
    )


def check_retry(job: Job, *, modify_resources: bool, new_resource_config: Mapping[str, Any] | None) -> None:
    """Raise unless the job may be retried with these arguments."""
    check_allowed(job, Action.RETRY)
    if modify_resources and new_resource_config is None:
        raise SpecError([Problem(field="new_resource_config", message="required when modify_resources is true")])
    if new_resource_config is not None and not modify_resources:
        raise SpecError([Problem(field="new_resource_config", message="set modify_resources to true to use it")])


def child_request(
    job: Job, *, new_resource_config: Mapping[str, Any] | None, handle: str | None = None
) -> SubmitJobRequest:
    """The request of a retry: the parent's, with other resources if they were given. The parent's handle stays its."""
    document = {**job.spec, "handle": handle}
    if new_resource_config is None:
        return load_stored(job.spec_version, document)
    resources = _resources(new_resource_config)
    document["resource_config"] = resources.model_dump(mode="json")
    document["training_config"] = _for_other_ranks(document.get("training_config"), resources)
    request = load_stored(job.spec_version, document)
    request.check_workload()
    return request


def in_queue(request: SubmitJobRequest, queue: str) -> SubmitJobRequest:
    """The same request for another queue."""
    return request.model_copy(
        update={"scheduling_config": request.scheduling_config.model_copy(update={"queue": queue})}
    )


def _for_other_ranks(training: Mapping[str, Any] | None, resources: ResourceConfig) -> Mapping[str, Any] | None:
    """A stored training_config in which the number of ranks follows from the GPUs, where those are others now."""
    if training is None or not resources.gpu_count:
        return training
    framework = training.get("framework") or {}
    distributed = framework.get("distributed") or {}
    if distributed.get("world_size") in (None, resources.gpu_count):
        return training
    return {**training, "framework": {**framework, "distributed": {**distributed, "world_size": None}}}


def _resources(document: Mapping[str, Any]) -> ResourceConfig:
    try:
        return parse(ResourceConfig, document)
    except SpecError as error:
        problems = [
            Problem(field=f"new_resource_config.{problem.field}", message=problem.message) for problem in error.problems
        ]
    raise SpecError(problems)
