"""Admission: the checks that need the outside, done once before a job is queued.

What needs the network is left to the job's own preparing step, which has the caller's tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from trainmaster.protocol.launch import CONTAINER, LOCAL
from trainmaster.server.coordinator.base_models import CONFIG, BaseModels
from trainmaster.server.core.errors import Problem, RefusedError, TrainmasterError
from trainmaster.server.core.job import Change, Job
from trainmaster.server.core.observations import admit, reject
from trainmaster.server.core.spec.documents import load_stored
from trainmaster.server.core.spec.submit import SubmitJobRequest
from trainmaster.server.core.training.sources import (
    SOURCE_TYPES,
    ModelSource,
    file_path,
    fixed_part,
    left_by_job,
    scheme_of,
)
from trainmaster.server.core.training.types import FrameworkType, missing, missing_options
from trainmaster.server.core.workloads import WorkloadSpec, effective_workload
from trainmaster.server.core.workloads.base import initializers_of
from trainmaster.server.core.workloads.script import ScriptSpec
from trainmaster.server.core.workloads.trainer import (
    configs_of,
    is_training,
    local_paths,
    models_from,
    training_document,
)
from trainmaster.server.core.workloads.trainer_service import TrainerServiceSpec

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
    """Lets jobs in, or says why not."""

    def __init__(
        self,
        *,
        data_roots: Sequence[Path] = (),
        artifacts: Path = Path(),
        services: Collection[str] = (),
        models: BaseModels | None = None,
        installed: Callable[[str], bool] = importable,
    ) -> None:
        """Take what this server has: where files may lie, where jobs leave theirs, services, base models, packages."""
        self._artifacts = artifacts.resolve()
        self._data_roots = tuple(root.resolve() for root in data_roots or (Path.home(),))
        self._services = frozenset(services)
        self._models = models or BaseModels()
        self._is_installed = installed
        self._found: set[str] = set()

    def require_packages(self, request: SubmitJobRequest, backend: str) -> None:
        """See that the workers' Python has what a job needs of it; what an image has, nobody knows before it runs.

        Raises:
            RefusedError: something is not installed; the message says how to install it.
        """
        if backend == LOCAL and (absent := next(self._not_installed(request), None)) is not None:
            raise RefusedError.because([absent])

    def at_once(self, job: Job, request: SubmitJobRequest) -> Change | None:
        """Queue a job that names nothing which has to be looked up; None when it has to wait for `decide`."""
        workload = effective_workload(request)
        if is_training(request.workload) or workload.working_directory is not None or workload.volumes:
            return None
        if isinstance(workload, TrainerServiceSpec) and not self._offers(workload, job):
            return None
        return None if self._server_script(workload) is not None else admit(job, now=job.created_at)

    def decide(self, job: Job, *, now: float) -> Change | None:
        """Queue a job, or fail it with the reason."""
        try:
            problem = next(self._problems(job), None)
        except TrainmasterError as error:
            problem = error.message
        except (OSError, ValueError, RuntimeError) as error:  # the last of links that lead in a circle
            problem = f"what it names on the server cannot be looked at: {error}"
        return reject(job, now=now, message=problem) if problem else admit(job, now=now)

    def _problems(self, job: Job) -> Iterator[str]:
        request = load_stored(job.spec_version, job.spec)
        workload = effective_workload(request)
        # In a container these are paths of its own; what it sees of the server is mounted.
        contained = job.backend == CONTAINER
        for volume in workload.volumes:
            if volume.path is not None:
                yield from self._outside(volume.path, "volume")
                if not Path(volume.path).exists():
                    yield f"volume {volume.path}: there is no such directory on the server"
        if workload.working_directory is not None and not contained:
            yield from self._outside(workload.working_directory, "working directory")
        script = None if contained else self._server_script(workload)
        if script is not None:
            yield from self._wrong_script(script)
        if is_training(request.workload):
            yield from self._wrong_training(job, request, workload)
        if isinstance(workload, TrainerServiceSpec):
            yield from self._wrong_model(workload, job)

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

    def _server_script(self, workload: WorkloadSpec) -> Path | None:
        """The script on the server that a workload names; None when it ships it, or is no script."""
        if not isinstance(workload, ScriptSpec) or workload.path in {file.path for file in workload.files}:
            return None
        return Path(workload.working_directory or "", workload.path)

    def _wrong_script(self, script: Path) -> Iterator[str]:
        if not script.is_absolute():
            yield (
                f"script {script} is a relative path, and the server cannot know to what; "
                "name it absolutely, or submit the job with `trainmaster submit`, which sends it along"
            )
        yield from self._outside(str(script), "script")
        if not script.is_file():
            yield f"there is no script {script} on the server; ship it, or check the path"

    def _wrong_training(self, job: Job, request: SubmitJobRequest, workload: WorkloadSpec) -> Iterator[str]:
        training, data = configs_of(request)
        if job.backend == LOCAL:
            # They were there when it was submitted; the workers may be elsewhere, or have changed since.
            yield from (problem.message for problem in self._not_installed(request))
        for field, path in local_paths(request):
            where = Path(workload.working_directory or "", path)
            if where.is_absolute() and not field.endswith("custom_script_path"):
                yield from self._outside(str(where), f"{field}:")
                # What matches a pattern is left to the job: to look for it may take for ever.
                if not where.exists() and not Path(fixed_part(str(where))).is_dir():
                    yield f"{field}: there is no {where} on the server; check the path"
        base, preprocess = training.base_model, data.preprocess
        for field, name in models_from(ModelSource.ARTIFACTS, base, data):
            yield from self._not_left(field, name)
        named = {str(base.source), *(SOURCE_TYPES.get((source.type or "").lower()) for source in data.sources)}
        paths = [base.model_id, base.tokenizer_id, preprocess.tokenizer_id, *(source.path for source in data.sources)]
        named |= {scheme_of(path) for path in paths if path}
        for service in SERVICES:
            if service in named and service not in self._services:
                yield f"this server knows no {service}: its operator can set {service}_url"
        output = file_path(request.output_config.output_path or "")
        if output:
            yield from self._outside(output, "output_config.output_path:")

    def _not_installed(self, request: SubmitJobRequest) -> Iterator[Problem]:
        if is_training(request.workload):
            training = configs_of(request)[0]
            if training.framework.type is FrameworkType.CUSTOM:
                return
            parameters = training_document(request)["training_config"]["hyperparameters"]
            if (absent := missing(training.framework.type, self._installed)) is not None:
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
        """Whether the workers' Python has a package; to look for one takes time, so that it is found once."""
        if package not in self._found and self._is_installed(package):
            self._found.add(package)
        return package in self._found

    def _not_left(self, field: str, name: str) -> Iterator[str]:
        wanted = left_by_job(name)
        own = self._artifacts / wanted.job_id
        found = (own / wanted.path).resolve()
        if not found.is_relative_to(own) or not found.is_dir():
            yield (
                f"{field}: job {wanted.job_id} has left no directory {wanted.path}; what a training leaves is there "
                f"when it has COMPLETED, and `trainmaster show {wanted.job_id}` names it"
            )

    def _outside(self, path: str, what: str) -> Iterator[str]:
        resolved = Path(path).resolve()
        if not any(resolved.is_relative_to(root) for root in self._data_roots):
            roots = ", ".join(map(str, self._data_roots))
            yield (
                f"{what} {path} lies outside the directories that this server allows ({roots}); "
                "ship the files, or start the server with a --data-root that holds it"
            )
