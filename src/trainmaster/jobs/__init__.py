"""What training code imports: `from trainmaster.jobs import report`, or a job class to build on.

Everything here also works outside a job: reports go nowhere, nobody asks for a stop, and checkpoints
are committed below a directory of one's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from trainmaster.jobs.attempt import NotOwnerError, Stop
from trainmaster.jobs.checkpoint import CorruptCheckpointError, Manifest, committed, verify

if TYPE_CHECKING:
    from trainmaster.jobs.ambient import build, configuration, configure, current_config, field, patch
    from trainmaster.jobs.basic_job import BasicJob, _BaseJob, job
    from trainmaster.jobs.checkpointed_job import CheckpointedJob
    from trainmaster.jobs.restoreable_job import RestoreableJob
    from trainmaster.jobs.spec import (
        Axis,
        Chip,
        Cluster,
        ClusterMachine,
        ExecutionSpec,
        HardwareRequest,
        HardwareResult,
        JobSpec,
        Topology,
    )

Leaf = TypeVar("Leaf")
PyTree: TypeAlias = Leaf | Mapping[Any, Any] | Sequence[Any]
"""A tree of arrays, for annotations: nested mappings, sequences and nodes that JAX knows."""

__all__ = [
    "Axis",
    "BasicJob",
    "CheckpointedJob",
    "Chip",
    "Cluster",
    "ClusterMachine",
    "CorruptCheckpointError",
    "ExecutionSpec",
    "HardwareRequest",
    "HardwareResult",
    "JobSpec",
    "Manifest",
    "NotOwnerError",
    "PyTree",
    "RestoreableJob",
    "Stop",
    "Topology",
    "_BaseJob",
    "build",
    "committed",
    "configuration",
    "configure",
    "current_config",
    "field",
    "job",
    "patch",
    "verify",
]

_ON_USE = {
    "ambient": {"build", "configuration", "configure", "current_config", "field", "patch"},
    "basic_job": {"BasicJob", "_BaseJob", "job"},
    "checkpointed_job": {"CheckpointedJob"},
    "restoreable_job": {"RestoreableJob"},
    "spec": {
        *("Axis", "Chip", "Cluster", "ClusterMachine", "ExecutionSpec"),
        *("HardwareRequest", "HardwareResult", "JobSpec", "Topology"),
    },
}
"""Imported on first use: a script that only reports needs the standard library alone, and starts fast."""


def __getattr__(name: str) -> Any:
    for module, names in _ON_USE.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
