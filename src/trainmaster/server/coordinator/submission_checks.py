"""What a new job needs when it is stored: a backend that can run it, and of its account's what it names, such as a
queue, a checkpoint, results and files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection

from trainmaster.backends.base import Capabilities
from trainmaster.protocol.launch import ContainerWish
from trainmaster.server.core.errors import JobNotFoundError, NotFoundError, Problem, RefusedError, SpecError
from trainmaster.server.core.job import Change, Checkpoint, Job
from trainmaster.server.core.retention import best_checkpoint
from trainmaster.server.core.spec import SubmitJobRequest
from trainmaster.server.core.training.sources import ModelSource, left_by_job
from trainmaster.server.core.workloads import compile_launch
from trainmaster.server.core.workloads.base import initializers_of
from trainmaster.server.core.workloads.container import KIND as CONTAINER
from trainmaster.server.core.workloads.initializers import InitializerSpec
from trainmaster.server.core.workloads.trainer import configs_of, is_training, models_from
from trainmaster.server.store import checkpoints, jobs, queues
from trainmaster.server.store.scope import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a request names, beside what its job has in columns."""

    blobs: frozenset[str]
    """The digests of the files that it ships."""
    results: tuple[tuple[str, str], ...]
    """Fields, and what they name that other jobs left."""


def named_in(request: SubmitJobRequest) -> Named:
    """What a request names."""
    results: tuple[tuple[str, str], ...] = ()
    if is_training(request.workload):
        training, data = configs_of(request)
        results = tuple(models_from(ModelSource.ARTIFACTS, training.base_model, data))
    return Named(blobs=frozenset(blob.sha256 for blob in compile_launch(request).blobs), results=results)


def check_backend(request: SubmitJobRequest, name: str, backends: Mapping[str, Capabilities]) -> None:
    """See that a backend can run a job.

    Raises:
        RefusedError: it lacks what the job needs.
    """
    launch, capable = compile_launch(request), backends[name]
    wishes = {
        "image": launch.image is not None,
        "volumes": bool(launch.volumes),
        "container": launch.container != ContainerWish(),
        **{f"initializers.{part}.image": spec.image is not None for part, spec in _fetched(request)},
    }
    wished = next((field for field, given in wishes.items() if given), None)
    if wished is not None and not capable.images:
        remedy = _remedy(other for other, each in backends.items() if each.images)
        without = "" if launch.kind == CONTAINER else f", or leave {wished} out"
        message = f"the backend {name} runs no containers; {remedy}{without}"
        raise RefusedError.because([Problem(field=f"workload.{wished}", message=message)])
    if capable.images and launch.image is None and not capable.own_image:
        message = (
            f"the backend {name} runs a job in an image, and this one names none: name it here (with TrainerClient: "
            "CustomTrainer(image=...), or a runtime that has one), or have the operator set container_image"
        )
        raise RefusedError.because([Problem(field="workload.image", message=message)])
    if launch.lifetime not in capable.lifetimes:
        remedy = _remedy(other for other, each in backends.items() if launch.lifetime in each.lifetimes)
        message = f"the backend {name} cannot run a {launch.lifetime} workload; {remedy}"
        raise RefusedError.because([Problem(field="backend", message=message)])


def _fetched(request: SubmitJobRequest) -> Iterable[tuple[str, InitializerSpec]]:
    initializers = initializers_of(request.workload)
    return initializers.named() if initializers is not None else ()


def _remedy(able: Iterable[str]) -> str:
    names = ", ".join(able)
    return f"use one of: {names}" if names else "this server has none that does"


def accepted(connection: Connection, scope: Scope, change: Change, named: Named) -> Change:
    """The change that makes a job, with the checkpoint that the job goes on from.

    Raises:
        SpecError: the job names something that is not there, or not its account's.
    """
    job = change.job
    check_queue(connection, scope, job.queue, "scheduling_config.queue")
    check_results(connection, scope, named.results)
    if job.resume_checkpoint_id and job.parent_job_id is None:
        chosen = _named_checkpoint(connection, scope, job, job.resume_checkpoint_id)
        change = Change(job=job.evolve(resume_checkpoint_id=chosen.checkpoint_id), events=change.events)
    return change


def check_queue(connection: Connection, scope: Scope, queue: str, field: str) -> None:
    """See that there is a queue.

    Raises:
        SpecError: there is none of this name.
    """
    if not queues.exists(connection, scope, queue):
        known = ", ".join(queue.name for queue in queues.all(connection, scope))
        raise SpecError([Problem(field=field, message=f"there is no queue {queue!r}; there are: {known}")])


def check_results(connection: Connection, scope: Scope, named: Iterable[tuple[str, str]]) -> None:
    """See that what fields name was left by jobs in scope. Whether it still lies there is for admission to see.

    Raises:
        SpecError: there is no such job in scope, or no directory of a job is written like that.
    """
    for field, name in named:
        try:
            wanted = left_by_job(name)
            found = jobs.get(connection, scope, wanted.job_id)
        except ValueError as error:
            raise SpecError([Problem(field=field, message=str(error))]) from None
        except JobNotFoundError:
            raise SpecError([Problem(field=field, message=f"there is no job {wanted.job_id}")]) from None
        if found.job_id != wanted.job_id:
            # A handle may be another job's by the time at which this one starts.
            message = f"name the job by its id: {ModelSource.ARTIFACTS}:{found.job_id}/{wanted.path}"
            raise SpecError([Problem(field=field, message=message)])


def _named_checkpoint(connection: Connection, scope: Scope, job: Job, checkpoint_id: str) -> Checkpoint:
    """What a new job goes on from: the checkpoint that it names, of any job of the account, or that job's best."""
    try:
        named = checkpoints.get(connection, scope, checkpoint_id)
    except NotFoundError:
        message = f"there is no committed checkpoint {checkpoint_id!r}"
        place = "training_config" if job.spec.get("training_config") else "workload"
        raise SpecError([Problem(field=f"{place}.resume_from_checkpoint", message=message)]) from None
    if not job.resumes_from_best:
        return named
    return best_checkpoint(job, checkpoints.of_job(connection, scope, named.job_id)) or named
