"""Trainmaster as a backend of the real `kubeflow` package: its own client, types and options, and jobs that run here.

    client = kubeflow.trainer.TrainerClient(kubeflow.trainer.LocalProcessBackendConfig())
    client.backend = trainmaster.trainer.kubeflow.KubeflowBackend()

The only module that imports `kubeflow`, which Trainmaster does not need; nothing of ours imports this one.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from kubeflow.trainer.backends.base import RuntimeBackend
from kubeflow.trainer.types import types as their_types

from trainmaster.trainer import options as our_options
from trainmaster.trainer import types as our_types
from trainmaster.trainer.client import TrainerClient
from trainmaster.trainer.constants import TRAINJOB_COMPLETE


class KubeflowBackend(RuntimeBackend):  # type: ignore[misc]
    """What kubeflow's `TrainerClient` asks of a backend, done by ours. Options may be kubeflow's or ours."""

    def __init__(self, client: TrainerClient | None = None) -> None:
        self.client = client or TrainerClient()
        """The client that does it, which can do more: suspend jobs, fetch what functions return."""

    def list_runtimes(self) -> list[Any]:
        return [_theirs(runtime) for runtime in self.client.list_runtimes()]

    def get_runtime(self, name: str) -> Any:
        return _theirs(self.client.get_runtime(name))

    def get_runtime_packages(self, runtime: Any) -> list[str]:
        return self.client.get_runtime_packages(_ours(runtime))

    def train(
        self, runtime: Any = None, initializer: Any = None, trainer: Any = None, options: list[Any] | None = None
    ) -> str:
        return self.client.train(
            runtime=_ours(runtime),
            initializer=_ours(initializer),
            trainer=_ours(trainer),
            options=None if options is None else [_converted(option, our_options) for option in options],
        )

    def list_jobs(self, runtime: Any = None) -> list[Any]:
        return [_theirs(job) for job in self.client.list_jobs(_ours(runtime))]

    def get_job(self, name: str) -> Any:
        return _theirs(self.client.get_job(name))

    def get_job_logs(self, name: str, follow: bool | None = False, step: str = "node-0") -> Iterator[str]:
        return self.client.get_job_logs(name, step=step, follow=follow)

    def get_job_events(self, name: str) -> list[Any]:
        return [_theirs(event) for event in self.client.get_job_events(name)]

    def wait_for_job_status(
        self,
        name: str,
        status: set[str] = frozenset({TRAINJOB_COMPLETE}),  # type: ignore[assignment]
        timeout: int = 600,
        polling_interval: int = 2,
        callbacks: list[Callable[[Any], None]] | None = None,
    ) -> Any:
        def call_back(job: our_types.TrainJob) -> None:
            for callback in callbacks or ():
                callback(_theirs(job))

        return _theirs(self.client.wait_for_job_status(name, status, timeout, polling_interval, [call_back]))

    def delete_job(self, name: str) -> None:
        self.client.delete_job(name)


def _ours(value: Any) -> Any:
    return _converted(value, our_types)


def _theirs(value: Any) -> Any:
    return _converted(value, their_types)


def _converted(value: Any, module: ModuleType) -> Any:
    """The same value in the classes of the other package, which have the same names and fields.

    Fields that the other class does not have are left out. What has no counterpart is passed on as it is, for whoever
    takes it to judge.
    """
    if isinstance(value, list):
        return [_converted(each, module) for each in value]
    named = (getattr(module, kind.__name__, None) for kind in type(value).__mro__)
    counterpart: Any = next((kind for kind in named if isinstance(kind, type)), None)
    if counterpart is None or isinstance(value, counterpart):
        return value
    if isinstance(value, enum.Enum):
        return counterpart(value.value)
    if not dataclasses.is_dataclass(value):
        return value
    known = {field.name for field in dataclasses.fields(value)}
    shared = [field.name for field in dataclasses.fields(counterpart) if field.init and field.name in known]
    made = counterpart(**{name: _converted(getattr(value, name), module) for name in shared})
    if hasattr(made, "set_command"):  # of a runtime; theirs cannot even be compared before somebody has called it
        made.set_command(getattr(value, "command", ()))
    return made
