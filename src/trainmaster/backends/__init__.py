"""Backends: verbs over an engine. They know no database and decide nothing about jobs.

`BACKENDS` registers them by name; each is imported on use, so that the server starts without any engine's client.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainmaster.backends.base import Backend, Capabilities, ImageFeature, PlacementBy
from trainmaster.backends.stand_ins import DeferredBackend, UnavailableBackend
from trainmaster.protocol.launch import CONTAINER, KUBERNETES, LOCAL, RAY, SLURM, Lifetime
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.run_directory import RunDirectory
from trainmaster.server.core.resources import share_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What is known of a backend without importing it. Functions are named as `module:function`."""

    make: str
    """Makes the backend from a `BackendContext`."""
    capabilities: Capabilities
    library: str = ""
    """The distribution that it needs in addition to Trainmaster's own dependencies."""
    extra: str = ""
    """The extra of this package that installs the library."""
    leaves_anything: str = ""
    """With a library: whether a server, by its `BackendContext`, leaves anything for the next one to look after."""


_ON_THIS_MACHINE = Capabilities(placement=PlacementBy.US, lifetimes=frozenset(Lifetime), runs_here=True)
BACKENDS: Mapping[str, Registration] = {
    LOCAL: Registration(
        make="trainmaster.backends.local:make", capabilities=replace(_ON_THIS_MACHINE, uses_server_python=True)
    ),
    CONTAINER: Registration(
        make="trainmaster.backends.container:make",
        capabilities=replace(
            _ON_THIS_MACHINE,
            isolates_accounts=True,
            nodes_of=LOCAL,  # a container takes the cores and GPUs of the same machine
            images=True,
            image_features=frozenset(ImageFeature),
            image_setting="container_image",
        ),
        library="docker",
        extra="containers",
        leaves_anything="trainmaster.backends.container.monitor:leaves_anything",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterKind:
    """A kind of cluster, of which an operator may declare several. Functions and classes are named as `module:name`."""

    engine: str
    """Makes the client of a cluster's engine from the backend's name, the server's instance, and the options."""
    options: str
    """The model of what an operator says of a cluster, a `ClusterOptions`."""
    capabilities: Capabilities
    library: str = ""
    """The distribution that the client needs in addition to Trainmaster's own dependencies."""
    extra: str = ""


_ON_A_CLUSTER = Capabilities(placement=PlacementBy.ENGINE, lifetimes=frozenset(Lifetime))
CLUSTER_KINDS: Mapping[str, ClusterKind] = {
    SLURM: ClusterKind(
        engine="trainmaster.backends.slurm.client:SlurmEngine",
        options="trainmaster.backends.slurm.options:SlurmOptions",
        capabilities=replace(_ON_A_CLUSTER, cannot_choose_by=frozenset({"node_anti_affinity"})),
    ),
    RAY: ClusterKind(
        engine="trainmaster.backends.ray.client:RayEngine",
        options="trainmaster.backends.ray.options:RayOptions",
        capabilities=replace(
            _ON_A_CLUSTER, cannot_choose_by=frozenset({"storage_min_mb", "node_affinity", "node_anti_affinity"})
        ),
    ),
    KUBERNETES: ClusterKind(
        engine="trainmaster.backends.kubernetes.client:KubernetesEngine",
        options="trainmaster.backends.kubernetes.options:KubernetesOptions",
        capabilities=replace(
            _ON_A_CLUSTER,
            isolates_accounts=True,
            images=True,
            image_features=frozenset({ImageFeature.PULL_POLICY, ImageFeature.SHARED_MEMORY}),
            fields=frozenset({KUBERNETES}),
        ),
        library="kubernetes",
        extra="kubernetes",
    ),
}
for _name, _registered in BACKENDS.items():
    if _registered.capabilities.nodes_of:
        share_nodes(_name, owner=_registered.capabilities.nodes_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerDefaults:
    """The server's settings for containers."""

    host: str = ""
    """Where the engine listens; empty: search."""
    runtime: str = ""
    """The engine it must be; empty: any."""
    pull_policy: str = "IfNotPresent"
    image: str = ""
    """For jobs that name none."""
    data_roots: tuple[Path, ...] = ()
    """Jobs may mount directories below these."""
    set_data_roots: tuple[Path, ...] = ()
    """The roots that the operator named: jobs may also write there. The default root, the home of the server's user,
    is read-only."""
    private: tuple[Path, ...] = ()
    """The server's own directories and files: no job may mount anything in them or above them."""


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
    """Contains all run directories."""
    container: ContainerDefaults = field(default_factory=ContainerDefaults)


def names_from(named: tuple[str, ...]) -> tuple[str, ...]:
    """The backends of this machine that a server has whose settings name these; the others are clusters."""
    if not named:
        return tuple(name for name in BACKENDS if is_installed(name))
    return tuple(name for name in named if name in BACKENDS)


def is_installed(name: str) -> bool:
    library = BACKENDS[name].library
    try:
        return not library or bool(importlib.metadata.version(library))
    except importlib.metadata.PackageNotFoundError:
        return False


def missing(name: str, present: Collection[str]) -> str:
    """Why a server does not have a backend, and what to do about it."""
    message = f"backend {name!r} is not available on this server; it has: {', '.join(sorted(present))}"
    if name not in BACKENDS:
        return message
    if not is_installed(name):
        return (
            f"{message}. Install what it needs where the server runs: pip install "
            f"'trainmaster[{BACKENDS[name].extra}]'; then restart the server (`trainmaster down`: running jobs go on)"
        )
    return f"{message}. It was not installed when the server was started, or the setting `backends` leaves it out"


def check_names(names: Iterable[str], clusters: Collection[str] = ()) -> None:
    """Raises ValueError if there is no backend of some name beside the declared clusters, or its library is missing."""
    for name in names:
        if name in clusters:
            continue
        if name not in BACKENDS:
            known = ", ".join((*BACKENDS, *clusters))
            raise ValueError(
                f"there is no backend {name!r}; there are: {known}; declare a cluster in [clusters.{name}]"
            )
        try:
            importlib.import_module(BACKENDS[name].make.partition(":")[0])
        except ImportError as error:
            needed = f"'trainmaster[{BACKENDS[name].extra}]'" if BACKENDS[name].extra else str(error.name)
            raise ValueError(f"backend {name!r} needs {error.name}: pip install {needed}") from None


def capabilities_of(name: str, settings: object = None) -> Capabilities:
    """The capabilities of a backend, on a server with these settings."""
    declared = BACKENDS[name].capabilities
    if settings is None or not declared.image_setting:
        return declared
    return replace(declared, own_image=getattr(settings, declared.image_setting))


def make_backends(named: tuple[str, ...], context: BackendContext) -> dict[str, Backend]:
    """The backends of a server whose settings name these, by name.

    One with a library that the settings do not name is imported when a job needs it: most servers never do. Backends
    that the server does not have get a stand-in, for jobs that an earlier server accepted.
    """
    chosen = names_from(named)

    def call(function: str) -> Any:
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(context)

    def backend(name: str) -> Backend:
        registered = BACKENDS[name]
        if name not in chosen:
            return UnavailableBackend(name, registered.capabilities, context.run_directory, why=missing(name, chosen))
        if named or not registered.library:
            made: Backend = call(registered.make)
            return made
        return DeferredBackend(
            name,
            registered.capabilities,
            lambda: call(registered.make),
            used=context.data_dir / f"{name}.used",
            leaves_something=lambda: bool(call(registered.leaves_anything)),
        )

    return {name: backend(name) for name in (*chosen, *(name for name in BACKENDS if name not in chosen))}
