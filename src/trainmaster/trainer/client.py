"""`TrainerClient`: Kubeflow's client, on a Trainmaster server."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from trainmaster import client as api
from trainmaster.client.file_upload import submit
from trainmaster.client.types import TERMINAL
from trainmaster.trainer.builtin_trainer import default_runtime
from trainmaster.trainer.constants import DEFAULT_TRAINING_RUNTIME, TRAINJOB_COMPLETE, TRAINJOB_RUNNING
from trainmaster.trainer.errors import IN_CONTAINERS, only_in_containers, translated
from trainmaster.trainer.foreign_jobs import ForeignJobs
from trainmaster.trainer.functions import files_of
from trainmaster.trainer.job_document import job_document, random_name
from trainmaster.trainer.job_view import name_of
from trainmaster.trainer.jobs import Jobs
from trainmaster.trainer.place import Place
from trainmaster.trainer.progress_bar import Wait
from trainmaster.trainer.runtimes import RuntimeCatalog, TrainingRuntime, runtime_of, runtime_packages
from trainmaster.trainer.server_choice import AnyBackendConfig, choose, connect, surroundings
from trainmaster.trainer.types import (
    BuiltinTrainer,
    CustomTrainer,
    CustomTrainerContainer,
    Event,
    Initializer,
    Runtime,
    ScriptTrainer,
    TrainJob,
)

_log = logging.getLogger(__name__)


class TrainerClient:
    """Trains functions, scripts, images and built-in trainers.

    Jobs are the server's: they outlive the client, and every client sees all of its account's. A job that is not there
    is a `NotFoundError`, which is a ValueError and a RuntimeError; what the server refuses is a ValueError, what cannot
    be done now a RuntimeError.
    """

    def __init__(self, backend_config: AnyBackendConfig | str | None = None) -> None:
        """Find the server; the local one is started when none runs.

        `backend_config` says where jobs run; the URL of a server is short for `ServerBackendConfig(url=...)`. None:
        where TRAINMASTER_URL or `trainmaster login` says, else on the Kubernetes cluster that Kubeflow's client would
        use, else on this machine; `backend` tells. Raises ValueError for a configuration that cannot be used, and
        RuntimeError if the server cannot be used, or neither container engine nor cluster answers.
        """
        around = surroundings()
        choice = choose(backend_config, around)
        with translated():
            self._client, self.backend = connect(choice, around)
        """Where jobs run, and why there."""
        _log.info("jobs run on %s", self.backend)
        self._common, self._initializers = choice.workload, choice.initializers
        self._place = Place(self._client, self.backend.name)
        self._catalog = RuntimeCatalog(self._client, choice.runtime_sources, place=self._place)
        self._jobs = Jobs(self._client, self._catalog, ForeignJobs(self._client, self._place))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection; jobs run on."""
        self._client.close()

    # Runtimes

    def list_runtimes(self) -> list[Runtime]:
        with translated():
            return self._catalog.list()

    def get_runtime(self, name: str) -> Runtime:
        """The runtime of a name; raises NotFoundError if there is none."""
        return runtime_of(self._definition(name))

    def get_runtime_packages(self, runtime: Runtime | str) -> list[str]:
        """Print and return the packages, and the GPUs, that jobs of a runtime find. A small job looks."""
        with translated():
            return runtime_packages(self._client, self._placed(self._definition(runtime)), backend=self.backend.name)

    # Jobs

    def train(
        self,
        runtime: str | Runtime | None = None,
        initializer: Initializer | None = None,
        trainer: CustomTrainer | CustomTrainerContainer | BuiltinTrainer | ScriptTrainer | None = None,
        options: list[Any] | None = None,
    ) -> str:
        """Submit a job; returns its name.

        Args:
            runtime: what the trainer builds upon; torch-distributed when None.
            initializer: a dataset and a model to fetch before.
            trainer: what runs; the runtime's own command when None.
            options: of `trainmaster.trainer.options`.

        Raises NameRefusedError if a job cannot have that name, or another has it.
        """
        if runtime is None and isinstance(trainer, BuiltinTrainer):
            runtime = default_runtime(trainer.config)
        definition = self._placed(self._definition(DEFAULT_TRAINING_RUNTIME if runtime is None else runtime))
        whole = trainer.directory if isinstance(trainer, ScriptTrainer) else None
        directory = None if whole is None else Path(whole).expanduser()
        with translated():
            kind = self._place.options_kind
        document = job_document(
            name=random_name(),
            runtime=definition,
            trainer=trainer,
            initializer=initializer,
            options=options,
            backend=self.backend.name,
            kind=kind,
            common=self._common,
            initializers=self._initializers,
            shipped=files_of(directory) if directory else (),
        )
        with translated(new=document["handle"]):
            try:
                if isinstance(trainer, ScriptTrainer):
                    submitted = submit(self._client, document, directory or Path.cwd())
                else:
                    submitted = self._client.submit(document)
            except api.RefusedError as error:
                if only_in_containers(error.problems) and not self._place.runs_images:
                    raise ValueError(IN_CONTAINERS) from error
                raise
        if document.get("resource_config"):
            self._jobs.warn(name_of(submitted))
        return name_of(submitted)

    def list_jobs(self, runtime: Runtime | str | None = None) -> list[TrainJob]:
        """All jobs of the account, the newest first; of one runtime alone, where it is named. On Kubernetes also the
        TrainJobs that others made in the namespace, which are only shown.

        Their steps are those of their nodes; checkpoints, and what a job waits for, are left out: `get_job` has them.
        """
        return self._jobs.list(None if runtime is None else _runtime_name(runtime))

    def get_job(self, name: str) -> TrainJob:
        """A job, with its steps, progress, metrics and checkpoints."""
        return self._jobs.shown(name)

    def get_job_logs(
        self,
        name: str,
        step: str = "node-0",
        follow: bool | None = False,
        *,
        tail: int | None = None,
        since: datetime | str | None = None,
    ) -> Iterator[str]:
        """The lines that a step wrote, on standard output and standard error.

        Args:
            step: one of the job's steps, such as `node-0`, `dataset-initializer` or `environment`.
            follow: go on until the job has ended, line by line; waits for its start, and over restarts of the server.
            tail: only the last so many.
            since: only those since a time: a datetime, or ISO 8601.
        """
        return self._jobs.log(name, step, follow=bool(follow), tail=tail, since=since)

    def get_job_events(self, name: str) -> list[Event]:
        """What happened to a job, from the beginning."""
        return self._jobs.events(name)

    def wait_for_job_status(
        self,
        name: str,
        status: Iterable[str] = frozenset({TRAINJOB_COMPLETE}),
        timeout: float = 600,
        polling_interval: float = 2,
        callbacks: list[Callable[[TrainJob], None]] | None = None,
    ) -> TrainJob:
        """Wait until a job has one of these statuses; a terminal or a notebook shows how far it is.

        A server that is away for a moment is waited for too. `status` is some of Created, Running, Complete and Failed;
        `timeout` and `polling_interval` are seconds; `callbacks` are called with the job at every look.

        Raises:
            RuntimeError: it failed, and that was not waited for; the message has the reason and its last lines.
            TimeoutError: it has none of them in time, or has ended and will not have one. Where Running is waited for,
                a job that is Complete by the next look is returned: it has run.
        """
        wait = Wait(status, timeout, polling_interval)
        with contextlib.closing(wait.looks()) as looks:
            for _ in looks:
                try:
                    shown = self._jobs.shown(name)
                except (RuntimeError, TimeoutError) as error:
                    if isinstance(error.__cause__, api.UnreachableError | api.UnavailableError):
                        continue
                    raise
                wait.show(shown)
                for callback in callbacks or ():
                    callback(shown)
                if shown.status in wait.wanted:
                    return shown
                if shown.state == "COMPLETED" and TRAINJOB_RUNNING in wait.wanted:
                    return shown  # it has run, between two looks
                if shown.state == "COMPLETED":
                    raise TimeoutError(f"job {name} is Complete, and will not be {wait.words()}")
                if shown.state in TERMINAL:
                    raise self._jobs.failure(shown)
        raise TimeoutError(wait.too_late(name))

    def get_job_result(self, name: str) -> Any:
        """What the job's function returned on rank 0; None of a job that ran something else.

        Raises RuntimeError if it has not ended well, or JSON cannot hold what the function returned.
        """
        return self._jobs.result(name)

    def suspend_job(self, name: str, *, save_checkpoint: bool = True) -> None:
        """Stop a running job so that it can go on later; its status is Created, and its state PAUSED, once it stopped.

        With `save_checkpoint` it saves first; one that has never saved needs False, and restarts.
        """
        self._jobs.suspend(name, save_checkpoint=save_checkpoint)

    def resume_job(self, name: str) -> None:
        """Queue a suspended job again; it resumes from its latest checkpoint."""
        self._jobs.resume(name)

    def retry_job(self, name: str) -> str:
        """Make a new job of a failed one, which resumes from its checkpoint; returns the new one's name.

        It is named after the other: `lab-2` after `lab`, or the next number that is free.
        """
        return self._jobs.retry(name)

    def cancel_job(self, name: str) -> None:
        """End a job for good; it stays in lists, as Failed. RuntimeError: it has ended already."""
        self._jobs.cancel(name)

    def delete_job(self, name: str) -> None:
        """Stop a job and take it off the lists; returns when nothing of it runs, and its name is free.

        Raises TimeoutError if it does not stop; it goes when it has.
        """
        self._jobs.delete(name)

    def _definition(self, runtime: object) -> TrainingRuntime:
        with translated():
            definition = self._catalog.definition(_runtime_name(runtime))
        self._jobs.forget_runtimes()
        return definition

    def _placed(self, definition: TrainingRuntime) -> TrainingRuntime:
        """A runtime as it is where jobs run: without its image, where the backend runs none."""
        if definition.image is None:
            return definition
        with translated():
            return definition if self._place.runs_images else replace(definition, image=None)


def _runtime_name(runtime: object) -> str:
    if isinstance(runtime, Runtime):
        return runtime.name
    if isinstance(runtime, str):
        return runtime
    raise ValueError(f"runtime must be a Runtime or the name of one, not a {type(runtime).__name__}")
