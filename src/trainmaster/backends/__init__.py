"""Backends: verbs over an engine. They know no database and decide nothing about jobs.

Registered by name and imported on use, so that the server starts without any engine's client.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.backends.base import Backend, Capabilities, PlacementBy
from trainmaster.backends.stand_ins import AbsentBackend, DeferredBackend
from trainmaster.protocol.launch import CONTAINER, LOCAL, Lifetime

if TYPE_CHECKING:
    from trainmaster.protocol.request import AttemptRequest
    from trainmaster.protocol.run_directory import RunDirectory

BACKENDS: Mapping[str, str] = {
    LOCAL: "trainmaster.backends.local:make",
    CONTAINER: "trainmaster.backends.container:make",
}
"""Name -> the function that makes it from a `BackendContext`."""
CAPABILITIES: Mapping[str, Capabilities] = {
    LOCAL: Capabilities(placement=PlacementBy.US, lifetimes=frozenset(Lifetime), colocates_gangs=True),
    CONTAINER: Capabilities(placement=PlacementBy.US, lifetimes=frozenset(Lifetime), colocates_gangs=True, images=True),
}
"""What each can do; known without importing it."""
LIBRARIES: Mapping[str, str] = {CONTAINER: "docker"}
"""Name -> the distribution that the backend stands on, beside what Trainmaster needs anyway."""
EXTRAS: Mapping[str, str] = {CONTAINER: "containers"}
"""Name -> the extra of this package that brings it."""
LEFTOVERS: Mapping[str, str] = {CONTAINER: "trainmaster.backends.container.upkeep:leaves_anything"}
"""Name -> the function that says whether a server, by its `BackendContext`, leaves anything to look after."""


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
    set_data_roots: tuple[Path, ...] = ()
    """Those that the operator has named, and that jobs may have mounted to write there. The home of the server's user,
    which holds where none is named, is not theirs to write to."""
    private: tuple[Path, ...] = ()
    """The server's own directories and files: no job has mounted what lies in them, or holds them."""


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


def names_from(named: tuple[str, ...]) -> tuple[str, ...]:
    """The backends of a server whose settings name these; where they name none, all that are installed."""
    return named or tuple(name for name in BACKENDS if is_installed(name))


def is_installed(name: str) -> bool:
    """Whether what a backend stands on is there; nothing is imported to find out."""
    if name not in LIBRARIES:
        return True
    try:
        importlib.metadata.version(LIBRARIES[name])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def missing(name: str, present: Collection[str]) -> str:
    """What to say of a backend that a server does not have, and what to do about it."""
    said = f"backend {name!r} is not available on this server; it has: {', '.join(sorted(present))}"
    if name not in BACKENDS:
        return said
    if not is_installed(name):
        return (
            f"{said}. Install what it needs where the server runs: pip install 'trainmaster[{EXTRAS[name]}]'; then "
            "start the server anew (`trainmaster down`: running jobs go on)"
        )
    return f"{said}. It was not installed when the server was started, or the setting `backends` leaves it out"


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
            needed = f"'trainmaster[{EXTRAS[name]}]'" if name in EXTRAS else str(error.name)
            raise ValueError(f"backend {name!r} needs {error.name}: pip install {needed}") from None


def capabilities_of(name: str, *, own_image: str = "") -> Capabilities:
    """What a backend can do, on a server with this image for jobs that name none.

    Raises:
        KeyError: there is no such backend.
    """
    declared = CAPABILITIES[name]
    return replace(declared, own_image=own_image) if declared.images else declared


def make_backends(named: tuple[str, ...], context: BackendContext) -> dict[str, Backend]:
    """The backends of a server whose settings name these, by their names.

    Those that nobody named are imported when a job needs them: most servers on which one is installed never do. What
    the server does not have is there too, for jobs that another server has taken.

    Raises:
        KeyError: there is none of some name.
    """
    chosen = names_from(named)

    def maker(name: str) -> Callable[[], Backend]:
        module, _, function = BACKENDS[name].partition(":")
        return lambda: getattr(importlib.import_module(module), function)(context)

    def deferred(name: str) -> Backend:
        def leaves_something() -> bool:
            module, _, function = LEFTOVERS[name].partition(":")
            return bool(getattr(importlib.import_module(module), function)(context))

        used = context.data_dir / f"{name}.used"
        return DeferredBackend(name, CAPABILITIES[name], maker(name), used=used, leaves_something=leaves_something)

    def made(name: str) -> Backend:
        if name not in chosen:
            return AbsentBackend(name, CAPABILITIES[name], context.run_directory, why=missing(name, chosen))
        if name in LIBRARIES and not named:
            return deferred(name)
        return maker(name)()

    return {name: made(name) for name in (*chosen, *(name for name in BACKENDS if name not in chosen))}
