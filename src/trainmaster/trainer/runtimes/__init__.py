"""Training runtimes: files in the shape of Kubeflow's, where they come from, and those that are built in."""

from __future__ import annotations

from trainmaster.trainer.runtimes.catalog import RuntimeCatalog, runtime_packages
from trainmaster.trainer.runtimes.document import RuntimeDocumentError, TrainingRuntime, read_runtime, runtime_of
from trainmaster.trainer.runtimes.sources import SourceError, SourceReader

__all__ = [
    "RuntimeCatalog",
    "RuntimeDocumentError",
    "SourceError",
    "SourceReader",
    "TrainingRuntime",
    "read_runtime",
    "runtime_of",
    "runtime_packages",
]
