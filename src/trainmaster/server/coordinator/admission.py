"""Whether a job is accepted, and queued. A submission passes four stages, and nothing else decides about it:

1. `look_up` checks what takes a process or reads files, before the request is compiled: the source of a function, and
   the directory of a base model.
2. `compile` checks the request against this server: the backend, its capabilities, installed packages. No I/O.
3. `accept` checks the new job in the transaction that stores it: capacity, user, queue, and what the job names of
   other jobs.
4. `admit_at_once` queues what names nothing on the server's disk, in the same transaction; the leader has `decide`
   look at the rest, and queue or fail it.

What needs the network is left to the job's own preparing step, which has the caller's tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from sqlalchemy import Connection

from trainmaster.backends import BACKENDS, capabilities_of
from trainmaster.backends import missing as missing_backend
from trainmaster.backends.base import Capabilities, FilesBy
from trainmaster.protocol.launch import LOCAL, Launch, Lifetime
from trainmaster.server.archive import CREDENTIALS, Archive, ObjectStoreAwayError
from trainmaster.server.coordinator.account_users import AccountIsolation
from trainmaster.server.coordinator.admission_checks import Capacity, SourceChecks, check_backend, why_unreachable
from trainmaster.server.coordinator.base_models import CONFIG, BaseModels
from trainmaster.server.core.errors import (
    ForbiddenError,
    JobNotFoundError,
    NotFoundError,
    Problem,
    RefusedError,
    SpecError,
    TrainmasterError,
)
from trainmaster.server.core.job import Change, CheckpointRecord, Job
from trainmaster.server.core.observations import admit, reject
from trainmaster.server.core.retention import best_checkpoint
from trainmaster.server.core.spec.documents import load_stored
from trainmaster.server.core.spec.submit import CompiledJob, SubmitJobRequest, compile_job
from trainmaster.server.core.training import sources as places
from trainmaster.server.core.training.sources import LeftByJob, ModelSource, left_by_job
from trainmaster.server.core.training.types import FrameworkType, missing, missing_options
from trainmaster.server.core.workloads.base import WorkloadSpec, initializers_of
from trainmaster.server.core.workloads.job_class import KIND as JOB_CLASS
from trainmaster.server.core.workloads.programs import ScriptSpec
from trainmaster.server.core.workloads.trainer import TRAINING_FILE, configs_of, is_training, local_paths, models_from
from trainmaster.server.core.workloads.trainer_service import TrainerServiceSpec
from trainmaster.server.storage import ARTIFACTS
from trainmaster.server.store import checkpoints, jobs, queues
from trainmaster.server.store.scope import Scope

SERVICES = ("scaidrive", "scaiatlas")
"""Schemes, and sources of models, that lead to a service whose address a server has to know."""

INITIALIZER_PACKAGES = {
    "huggingface": ("huggingface_hub", "hub"),
    "s3": ("obstore", "s3"),
    "cache": ("pyiceberg", "cache"),
}
"""What each type of initializer imports, and the extra that has it."""


def importable(package: str) -> bool:
    """Whether the Python of this process, which is that of local workers, has a package; without importing it."""
    importlib.invalidate_caches()  # it may have been installed since
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:
        return False


class Admission:
    def __init__(
        self,
        *,
        backends: Mapping[str, Capabilities] = MappingProxyType({}),
        default_backend: str = LOCAL,
        tenants: AccountIsolation | None = None,
        capacity: Capacity | None = None,
        models: BaseModels | None = None,
        sources: SourceChecks | None = None,
        allow_trust_remote_code: bool = False,
        data_roots: Sequence[Path] = (),
        artifacts: Path = Path(),
        archive: Archive | None = None,
        services: Collection[str] = (),
        server_url: str = "",
        installed: Callable[[str], bool] = importable,
    ) -> None:
        """`data_roots` are the directories that jobs may name, `artifacts` is where they leave their results, and
        `archive` where these move; `services` are those whose addresses are set, `server_url` is where workers on
        clusters reach the server, and `installed` knows the packages of the workers' Python."""
        self.backends = backends
        self.default_backend = default_backend
        self._tenants = tenants
        self._capacity = capacity or Capacity()
        self._models = models or BaseModels()
        self._sources = sources or SourceChecks()
        self._allow_trust_remote_code = allow_trust_remote_code
        self._artifacts = artifacts.resolve()
        self._archive = archive
        self._data_roots = tuple(root.resolve() for root in data_roots or (Path.home(),))
        self._services = frozenset(services)
        self._server_url = server_url
        self._is_installed = installed
        self._found: set[str] = set()

    def backend(self, name: str) -> Capabilities:
        """What a backend can do; raises NotFoundError when this server does not have it."""
        if name not in self.backends:
            raise NotFoundError(missing_backend(name, self.backends))
        return self.backends[name]

    async def look_up(self, request: SubmitJobRequest, account_id: str) -> SubmitJobRequest:
        """Check the source of a function, and fill in the directory of a base model."""
        await self._sources.check(request, account_id)
        return await self._models.looked_up(request, account_id)

    def compile(self, request: SubmitJobRequest, account_id: str) -> CompiledJob:
        if request.backend is not None and request.backend not in self.backends:
            raise RefusedError(missing_backend(request.backend, self.backends))
        trusts = request.training_config is not None and request.training_config.base_model.trust_remote_code
        if trusts and not self._allow_trust_remote_code:
            raise ForbiddenError(
                "training_config.base_model.trust_remote_code: this server does not let jobs run code that comes with "
                "a model; its operator can allow that with the setting allow_trust_remote_code"
            )
        compiled = compile_job(self._models.named(request, account_id))
        backend = request.backend or self.default_backend
        check_backend(compiled, backend, self.backends)
        if self.backends[backend].files is FilesBy.OBJECT_ROOT:
            self._check_object_root(compiled, backend)
        if self.backends[backend].uses_server_python:
            absent = next(self._not_installed(compiled.request, compiled.launch), None)
            if absent is not None:
                raise RefusedError.because([absent])
        return compiled

    def reach(self, connection: Connection, backend: str) -> tuple[str, str]:
        """Where workers of a backend reach this server, and why they cannot; the address is empty where they share its
        machine."""
        capable = self.backends[backend]
        if capable.runs_here:
            return "", ""
        server_url = capable.server_url or self._server_url
        return server_url, why_unreachable(connection, backend, server_url)

    def _check_object_root(self, compiled: CompiledJob, backend: str) -> None:
        if self._archive is None:
            raise RefusedError(
                f"jobs of the backend {backend} save to the server's object store, and the server has none: have its "
                "operator set object_root, or the option `files` of the backend to `server`"
            )
        launch = compiled.launch
        saves_directly = launch.lifetime is Lifetime.BATCH and launch.kind != JOB_CLASS
        if saves_directly and (own := [name for name in CREDENTIALS if name in launch.secrets]):
            message = (
                f"{', '.join(own)}: jobs of the backend {backend} save to the server's object store with its AWS_* "
                "variables, and can have no others; use another backend, or have its operator set its option `files` "
                "to `server`"
            )
            raise RefusedError.because([Problem(field="workload.environment", message=message)])

    def accept(
        self, connection: Connection, scope: Scope, change: Change, request: SubmitJobRequest, *, resized: bool = True
    ) -> Change:
        """The change that makes a job, with the checkpoint that the job resumes from. A retry with its parent's
        resources (`resized` false) is taken even if the nodes that held the parent are gone."""
        job = change.job
        capable = self._capable(job)
        if resized:
            self._capacity.require(connection, job, apart=capable.job_nodes_apart)
        self._capacity.require_time(connection, job)
        _, unreachable = self.reach(connection, job.backend)
        if unreachable:
            raise RefusedError(unreachable)
        if self._tenants is not None:
            self._tenants.require(connection, scope, job.account_id, capable)
            if request.workload is not None and (options := request.workload.kubernetes) is not None:
                self._tenants.require_patches(job.account_id, options.request().pod_patches)
        check_queue(connection, scope, job.queue, "scheduling_config.queue")
        if is_training(request.workload):
            training, data = configs_of(request)
            check_results(connection, scope, models_from(ModelSource.ARTIFACTS, training.base_model, data))
        if job.resume_checkpoint_id and job.parent_job_id is None:
            chosen = _named_checkpoint(connection, scope, job, job.resume_checkpoint_id)
            change = Change(job=job.evolve(resume_checkpoint_id=chosen.checkpoint_id), events=change.events)
        return change

    def admit_at_once(self, job: Job, compiled: CompiledJob) -> Change | None:
        """Queue a job that names nothing which has to be looked up; None when it has to wait for `decide`."""
        workload = compiled.workload
        if is_training(compiled.request.workload) or workload.working_directory is not None or workload.volumes:
            return None
        if isinstance(workload, TrainerServiceSpec) and not self._offers(workload, job):
            return None
        return None if _server_script(workload) is not None else admit(job, now=job.created_at)

    def decide(self, job: Job, *, now: float) -> Change | None:
        try:
            problem = next(self._problems(job), None)
        except TrainmasterError as error:
            problem = error.message
        except (OSError, ValueError, RuntimeError) as error:  # the last of links that lead in a circle
            problem = f"a file or directory that it names on the server cannot be read: {error}"
        return reject(job, now=now, message=problem) if problem else admit(job, now=now)

    def _problems(self, job: Job) -> Iterator[str]:
        compiled = compile_job(load_stored(job.spec_version, job.spec))
        request, workload = compiled.request, compiled.workload
        capable = self._capable(job)
        for volume in workload.volumes:
            if volume.path is not None:
                yield from self._outside(volume.path, "volume")
                if not Path(volume.path).exists():
                    yield f"volume {volume.path}: there is no such directory on the server"
        # In an image these are paths of the container, and on a cluster paths of its nodes.
        sees_files = capable.runs_here and not capable.images
        if workload.working_directory is not None and sees_files:
            yield from self._outside(workload.working_directory, "working directory")
        script = _server_script(workload) if sees_files else None
        if script is not None:
            yield from self._wrong_script(script)
        if is_training(request.workload):
            if capable.uses_server_python:
                # They were there when it was submitted; the workers may be elsewhere, or have changed since.
                yield from (problem.message for problem in self._not_installed(request, compiled.launch))
            yield from self._wrong_training(request, workload, sees_files=capable.runs_here)
        if isinstance(workload, TrainerServiceSpec):
            yield from self._wrong_model(workload, job)

    def _capable(self, job: Job) -> Capabilities:
        """What the backend of a job can do, even if this server no longer has that backend."""
        if job.backend in self.backends or job.backend not in BACKENDS:
            return self.backend(job.backend)
        return capabilities_of(job.backend)

    def _offers(self, workload: TrainerServiceSpec, job: Job) -> bool:
        return workload.model_path is not None and self._models.owns(Path(workload.model_path), job.account_id)

    def _wrong_model(self, workload: TrainerServiceSpec, job: Job) -> Iterator[str]:
        path = workload.model_path or ""
        if not self._offers(workload, job):
            yield from self._outside(path, "model_path")
        model = self._models.at(Path(path), job.account_id, name=path, within=self._data_roots)
        if not model.has(CONFIG):
            yield f"model_path: {path} has no {CONFIG}, so it is no transformers checkpoint"
        model.require(workload.max_context_length)

    def _wrong_script(self, script: Path) -> Iterator[str]:
        if not script.is_absolute():
            yield (
                f"script {script} is a relative path, which the server cannot resolve; use an absolute path, or submit "
                "the job with `trainmaster submit`, which uploads the script"
            )
        yield from self._outside(str(script), "script")
        if not script.is_file():
            yield f"there is no script {script} on the server; ship it, or check the path"

    def _wrong_training(self, request: SubmitJobRequest, workload: WorkloadSpec, *, sees_files: bool) -> Iterator[str]:
        training, data = configs_of(request)
        for field, path in local_paths(request) if sees_files else ():
            where = Path(workload.working_directory or "", path)
            if where.is_absolute() and not field.endswith("custom_script_path"):
                yield from self._outside(str(where), f"{field}:")
                # What matches a pattern is left to the job: to look for it may take for ever.
                if not where.exists() and not Path(places.fixed_part(str(where))).is_dir():
                    yield f"{field}: there is no {where} on the server; check the path"
        base, preprocess = training.base_model, data.preprocess
        for field, name in models_from(ModelSource.ARTIFACTS, base, data):
            yield from self._not_left(field, name)
        named = {str(base.source), *(places.SOURCE_TYPES.get((source.type or "").lower()) for source in data.sources)}
        paths = [base.model_id, base.tokenizer_id, preprocess.tokenizer_id, *(source.path for source in data.sources)]
        named |= {places.scheme_of(path) for path in paths if path}
        for service in SERVICES:
            if service in named and service not in self._services:
                yield f"this server knows no {service}: its operator can set {service}_url"
        if output := places.file_path(request.output_config.output_path or ""):
            yield from self._outside(output, "output_config.output_path:")

    def _not_installed(self, request: SubmitJobRequest, launch: Launch) -> Iterator[Problem]:
        if is_training(request.workload):
            framework = configs_of(request)[0].framework.type
            if framework is FrameworkType.CUSTOM:
                return
            parameters = json.loads(launch.inputs[TRAINING_FILE])["training_config"]["hyperparameters"]
            if (absent := missing(framework, self._installed)) is not None:
                yield Problem(field="training_config.framework.type", message=absent)
            elif (absent := missing_options(parameters, self._installed)) is not None:
                yield Problem(field="training_config.hyperparameters", message=absent)
        elif (initializers := initializers_of(request.workload)) is not None:
            for part, spec in initializers.named():
                module, extra = INITIALIZER_PACKAGES[spec.type]
                if spec.image is None and not self._installed(module):
                    message = (
                        f"the workers' Python has no {module}, which an initializer of type {spec.type} needs: run "
                        f"`pip install 'trainmaster[{extra}]'` there, and submit the job again"
                    )
                    yield Problem(field=f"workload.initializers.{part}.type", message=message)

    def _installed(self, package: str) -> bool:
        """Whether the workers' Python has a package. Looking for one takes time: one that was found is remembered."""
        if package not in self._found and self._is_installed(package):
            self._found.add(package)
        return package in self._found

    def _not_left(self, field: str, name: str) -> Iterator[str]:
        wanted = left_by_job(name)
        own = self._artifacts / wanted.job_id
        found = (own / wanted.path).resolve()
        if not found.is_relative_to(own) or not (found.is_dir() or self._is_stored(wanted)):
            yield (
                f"{field}: job {wanted.job_id} has left no directory {wanted.path}; what a training leaves is there "
                f"when it has COMPLETED, and `trainmaster show {wanted.job_id}` names it"
            )

    def _is_stored(self, wanted: LeftByJob) -> bool:
        if self._archive is None:
            return False
        try:
            unit = self._archive.unit(f"{ARTIFACTS}/{wanted.job_id}")
        except ObjectStoreAwayError:
            return True  # the launch waits for the store, and looks again
        return unit is not None and any(name.startswith(f"{wanted.path}/") for name in unit.files)

    def _outside(self, path: str, what: str) -> Iterator[str]:
        resolved = Path(path).resolve()
        if not any(resolved.is_relative_to(root) for root in self._data_roots):
            roots = ", ".join(map(str, self._data_roots))
            yield (
                f"{what} {path} lies outside the directories that this server allows ({roots}); "
                "ship the files, or start the server with a --data-root that holds it"
            )


def _server_script(workload: WorkloadSpec) -> Path | None:
    """The script on the server that a workload names; None when it ships it, or is no script."""
    if not isinstance(workload, ScriptSpec) or workload.path in {file.path for file in workload.files}:
        return None
    return Path(workload.working_directory or "", workload.path)


def check_queue(connection: Connection, scope: Scope, queue: str, field: str) -> None:
    if not queues.exists(connection, scope, queue):
        known = ", ".join(queue.name for queue in queues.all(connection, scope))
        raise SpecError([Problem(field=field, message=f"there is no queue {queue!r}; there are: {known}")])


def check_results(connection: Connection, scope: Scope, named: Iterable[tuple[str, str]]) -> None:
    """Check that what fields name was left by jobs in scope. `decide` looks whether it still lies there."""
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


def _named_checkpoint(connection: Connection, scope: Scope, job: Job, checkpoint_id: str) -> CheckpointRecord:
    """The checkpoint that a new job resumes from: the one that it names, or the best of the job that has that one."""
    try:
        named = checkpoints.get(connection, scope, checkpoint_id)
    except NotFoundError:
        message = f"there is no committed checkpoint {checkpoint_id!r}"
        place = "training_config" if job.spec.get("training_config") else "workload"
        raise SpecError([Problem(field=f"{place}.resume_from_checkpoint", message=message)]) from None
    if not job.resumes_from_best:
        return named
    return best_checkpoint(job, checkpoints.of_job(connection, scope, named.job_id)) or named
