"""Checks of submissions: the backend, what a request names, the capacity of the cluster, the source of functions."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from sqlalchemy import Connection

from trainmaster.backends.base import Capabilities
from trainmaster.protocol.launch import ContainerWish
from trainmaster.server.core.errors import (
    ForbiddenError,
    JobNotFoundError,
    NotFoundError,
    Problem,
    RefusedError,
    SpecError,
)
from trainmaster.server.core.job import Change, Checkpoint, Job
from trainmaster.server.core.resources import Needs, Node
from trainmaster.server.core.retention import best_checkpoint
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.training.sources import ModelSource, left_by_job
from trainmaster.server.core.workloads import compile_launch, function_source
from trainmaster.server.core.workloads.base import initializers_of
from trainmaster.server.core.workloads.container import KIND as CONTAINER
from trainmaster.server.core.workloads.function import FunctionSpec
from trainmaster.server.core.workloads.initializers import InitializerSpec
from trainmaster.server.core.workloads.trainer import configs_of, is_training, models_from
from trainmaster.server.scheduling.shortage import needs_in_words, restored_pool, why_never
from trainmaster.server.store import checkpoints, jobs, nodes, queues
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


def check_remote_code(request: SubmitJobRequest, *, allowed: bool) -> None:
    """See that a job may run the code that comes with its model, if it wants to.

    Raises:
        ForbiddenError: it may not.
    """
    trusts = request.training_config is not None and request.training_config.base_model.trust_remote_code
    if trusts and not allowed:
        raise ForbiddenError(
            "training_config.base_model.trust_remote_code: this server does not let jobs run code that comes with "
            "a model; its operator can allow that with the setting allow_trust_remote_code"
        )


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


def checkpoint_of_line(connection: Connection, scope: Scope, job: Job, checkpoint_id: str) -> Checkpoint:
    """A checkpoint that belongs to the job or to one that it descends from.

    Raises:
        NotFoundError: the account has no such checkpoint.
        SpecError: the checkpoint belongs to another line of jobs.
    """
    checkpoint = checkpoints.get(connection, scope, checkpoint_id)
    owner = jobs.get(connection, scope, checkpoint.job_id, deleted=True)
    if owner.root_job_id != job.root_job_id:
        message = f"belongs to job {owner.job_id}, which is not of this job's line"
        raise SpecError([Problem(field="checkpoint_id", message=message)])
    return checkpoint


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


WAITING_FIELD = "scheduling_config.allow_waiting_for_nodes"
FRESH_S = 10.0
"""How long the nodes that were read are used: reading thousands of them for every job would take too long."""
_EVERYTHING = Scope.everything()


class Capacity:
    """Refuses jobs that the known nodes could never hold, as of the last read of the nodes. Not thread-safe."""

    def __init__(self, *, autoscaling: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """With `autoscaling`, nodes are added for jobs that wait, so that no request is refused."""
        self._autoscaling = autoscaling
        self._clock = clock
        self._remember([])

    def require(self, connection: Connection, job: Job) -> None:
        """See that some nodes could hold a job if nothing else ran; drained and offline nodes count.

        Free disk space does not, as it changes. While a backend has no known nodes, nothing is refused.

        Raises:
            RefusedError: none could; the message says what comes nearest.
        """
        if self._autoscaling or job.waits_for_nodes:
            return
        needs = replace(job.needs, storage_mb=0) if job.needs.storage_mb else job.needs
        if self._clock() - self._looked_at < FRESH_S and self._could_hold(job.host_backend, needs):
            return
        # Nodes may have come or gone since the last look.
        self._remember(nodes.all(connection, _EVERYTHING))
        here = [node for node in self._nodes if node.backend == job.host_backend]
        if not here or self._could_hold(job.host_backend, needs):
            return
        why, _ = why_never(needs, here, job.host_backend)
        wanted = needs_in_words(needs, self._pool.wish(job.host_backend, needs).gpus)
        message = (
            f"no node could ever hold {wanted}: {why}. Ask for less; or, if such nodes will be added, set "
            f"{WAITING_FIELD} to true, and the job waits for them"
        )
        raise RefusedError.because([Problem(field="resource_config", message=message)])

    def _remember(self, found: Sequence[Node]) -> None:
        self._nodes = found
        self._looked_at = self._clock()
        self._pool = restored_pool(found)

    def _could_hold(self, backend: str, needs: Needs) -> bool:
        return self._pool.wish(backend, needs).possible


SOURCE_CHECKS_AT_ONCE = 2
"""Processes of all accounts; one account has one at a time, so that it cannot keep others waiting."""
SOURCE_CHECK_TIMEOUT_S = 30.0
"""For a process that gets no CPU. One that computes ends by its own limit, long before."""
TOO_MUCH = "takes too much time or memory to parse; put most of it into files that you ship with the job"


class SourceChecks:
    """Checks the source of submitted functions in a process with limits (`core.workloads.function_source`).

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(SOURCE_CHECKS_AT_ONCE)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def check(self, request: SubmitJobRequest, account_id: str) -> None:
        """Return if a request has no function, or one whose source is fine.

        Raises:
            SpecError: the source is not Python, does not define the function, or costs too much to parse.
        """
        spec = request.workload
        if not isinstance(spec, FunctionSpec):
            return
        turn = self._turns.setdefault(account_id, asyncio.Lock())
        async with turn, self._slots:
            problem = await asyncio.to_thread(_problem_of, spec)
        if problem is not None:
            raise SpecError([Problem(field="workload.source", message=problem)])


def _problem_of(spec: FunctionSpec) -> str | None:
    # The Python of an image may be newer than the server's.
    asked = {"source": spec.source, "name": spec.name, "newer_python": spec.image is not None}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", function_source.__file__],
            input=json.dumps(asked).encode(),
            capture_output=True,
            env={},
            cwd="/",
            timeout=SOURCE_CHECK_TIMEOUT_S,
            check=True,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return TOO_MUCH
    problem: str | None = json.loads(done.stdout)
    return problem
