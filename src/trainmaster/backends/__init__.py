"""Backends: verbs over an engine. They know no database and decide nothing about jobs.

Registered by name and imported on first use, so that the server starts without any engine's client.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmaster.backends.base import Backend, Capabilities
    from trainmaster.protocol.request import AttemptRequest
    from trainmaster.protocol.rundir import RunDirectory

BACKENDS: Mapping[str, str] = {
    "local": "trainmaster.backends.local:make",
    "container": "trainmaster.backends.container:make",
}
"""Name -> the function that makes it from a `BackendContext`; its module has the backend's `CAPABILITIES` too."""
EXTRAS: Mapping[str, str] = {"container": "containers"}
"""Name -> the extra of this package that brings what the backend stands on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerDefaults:
    """What a server says of its containers."""

    host: str = ""
    """Where the engine listens; empty: wherever one is found."""
    runtime: str = ""
    """Which engine it must be; empty: whichever is found."""
    pull_policy: str = "IfNotPresent"
    image: str = ""
    """For jobs that name none."""
    data_roots: tuple[Path, ...] = ()
    """Where directories may lie that jobs have mounted."""
    private: tuple[Path, ...] = ()
    """The server's own directories, which no job has mounted as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What a server tells its backends."""

    data_dir: Path
    """Where a backend may keep state of its own."""
    run_directory: Callable[[AttemptRequest], RunDirectory]
    """The server's side of an attempt's files."""
    simulated_gpus: str = ""
    slots_per_node: int = 0
    runs: Path = Path("runs")
    """Below which all run directories lie."""
    container: ContainerDefaults = field(default_factory=ContainerDefaults)


def check_names(names: Iterable[str]) -> None:
    """See that there are backends of these names, and what they stand on.

    Raises:
        ValueError: there is none of some name, or it lacks a library.
    """
    for name in names:
        if name not in BACKENDS:
            raise ValueError(f"there is no backend {name!r}; there are: {', '.join(BACKENDS)}")
        try:
            importlib.import_module(BACKENDS[name].partition(":")[0])
        except ImportError as error:
            extra = f"trainmaster[{EXTRAS[name]}]" if name in EXTRAS else str(error.name)
            raise ValueError(f"backend {name!r} needs {error.name}: install {extra}") from None


def capabilities_of(name: str) -> Capabilities:
    """What a backend can do, without making it.

    Raises:
        KeyError: there is no such backend.
    """
    declared: Capabilities = importlib.import_module(BACKENDS[name].partition(":")[0]).CAPABILITIES
    return declared


def make_backend(name: str, context: BackendContext) -> Backend:
    """A backend by its name.

    Raises:
        KeyError: there is no such backend.
    """
    module, _, function = BACKENDS[name].partition(":")
    made: Backend = getattr(importlib.import_module(module), function)(context)
    return made
