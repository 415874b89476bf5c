"""Backends: verbs over an engine. They know no database and decide nothing about jobs.

Registered by name and imported on first use, so that the server starts without any engine's client.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmaster.backends.base import Backend
    from trainmaster.protocol.request import AttemptRequest
    from trainmaster.protocol.rundir import RunDirectory

BACKENDS: Mapping[str, str] = {"local": "trainmaster.backends.local:make"}
"""Name -> the function that makes it from a `BackendContext`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What a server tells its backends."""

    data_dir: Path
    """Where a backend may keep state of its own."""
    run_directory: Callable[[AttemptRequest], RunDirectory]
    """The server's side of an attempt's files."""
    simulated_gpus: str = ""
    slots_per_node: int = 0


def check_names(names: Iterable[str]) -> None:
    """See that there are backends of these names.

    Raises:
        ValueError: there is none of some name.
    """
    for name in names:
        if name not in BACKENDS:
            raise ValueError(f"there is no backend {name!r}; there are: {', '.join(BACKENDS)}")


def make_backend(name: str, context: BackendContext) -> Backend:
    """A backend by its name.

    Raises:
        KeyError: there is no such backend.
    """
    module, _, function = BACKENDS[name].partition(":")
    made: Backend = getattr(importlib.import_module(module), function)(context)
    return made
