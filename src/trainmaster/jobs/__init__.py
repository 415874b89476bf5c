"""What training code imports: `from trainmaster.jobs import report`, or a job class to build on.

Everything here also works outside a job: reports go nowhere, nobody asks for a stop, and checkpoints
are committed below a directory of one's own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from trainmaster.jobs.checkpoint import CorruptCheckpointError, Manifest, committed, verify
from trainmaster.jobs.control import Stop
from trainmaster.jobs.owner import NotOwnerError

if TYPE_CHECKING:
    from trainmaster.jobs.basic_job import BasicJob
    from trainmaster.jobs.checkpointed_job import CheckpointedJob
    from trainmaster.jobs.hardware import Cluster
    from trainmaster.jobs.registry import job
    from trainmaster.jobs.restoreable_job import RestoreableJob
    from trainmaster.jobs.spec import ExecutionSpec, JobSpec

__all__ = [
    "BasicJob",
    "CheckpointedJob",
    "Cluster",
    "CorruptCheckpointError",
    "ExecutionSpec",
    "JobSpec",
    "Manifest",
    "NotOwnerError",
    "RestoreableJob",
    "Stop",
    "committed",
    "job",
    "verify",
]

_ON_USE = {
    "BasicJob": "basic_job",
    "CheckpointedJob": "checkpointed_job",
    "RestoreableJob": "restoreable_job",
    "Cluster": "hardware",
    "ExecutionSpec": "spec",
    "JobSpec": "spec",
    "job": "registry",
}
"""Imported when they are asked for: whoever only reports needs the standard library, and no time."""


def __getattr__(name: str) -> Any:
    if name not in _ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ON_USE[name]}"), name)
