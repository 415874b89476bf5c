"""Which server a client talks to, and on which of its backends the client's jobs run.

A configuration that is given is what is used, or refused. Without one it is decided here, and `Backend` says what was
chosen and why.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainmaster.client import login
from trainmaster.client.server_lookup import URL_VARIABLE
from trainmaster.plain_yaml import YamlError, parse_yaml
from trainmaster.protocol.launch import CONTAINER, LOCAL
from trainmaster.trainer.configs import (
    SERVER_URL,
    AnyBackendConfig,
    ContainerBackendConfig,
    KubernetesBackendConfig,
    LocalProcessBackendConfig,
    ServerBackendConfig,
)

NOT_YET = "this version has no Kubernetes backend"
_REMEDY = (
    "to run on this machine, pass LocalProcessBackendConfig() or ContainerBackendConfig(); for a server elsewhere, "
    f"pass ServerBackendConfig(url=...) or set {URL_VARIABLE}"
)
_IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen, before anything was asked of a server."""

    name: str | None
    """The server's backend that jobs name; None: its own choice."""
    why: str
    server: ServerBackendConfig | None = None
    """None: the configured server, or the local one."""
    engine: Mapping[str, str] = field(default_factory=dict)
    """What was asked of the engine, as settings of a server: `container_host`, `container_runtime`."""
    runtime_sources: tuple[str, ...] = ()
    workload: Mapping[str, Any] = field(default_factory=dict)
    """What the workload of every job says."""
    initializers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What every `dataset` and every `model` that is fetched says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Where a client's jobs run."""

    url: str
    """The server that has them."""
    name: str | None
    """The backend of it that they name; None: the server's own choice."""
    why: str
    """How that came about."""
    this_machine: bool = False
    """Whether that is the server of this machine, which clients start when none runs."""

    def __str__(self) -> str:
        where = f"this machine, {self.url}" if self.this_machine else self.url
        return f"{self.name or 'the default backend'} of {where} ({self.why})"

    def __repr__(self) -> str:
        return f"<Backend: {self}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a choice without a configuration depends on."""

    environment: Mapping[str, str]
    home: Path
    in_cluster: bool
    ask: Callable[[str], bool] | None
    """Asks a person to agree; None: there is nobody to ask."""
    login: str | None = None
    """The URL of the server that `trainmaster login` saved."""


def surroundings() -> Surroundings:
    """Those of this process."""
    present = sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty()
    return Surroundings(
        environment=os.environ,
        home=Path.home(),
        in_cluster="KUBERNETES_SERVICE_HOST" in os.environ and _IN_CLUSTER.exists(),
        ask=_ask_once if present else None,
        login=saved.url if (saved := login.load()) else None,
    )


def choose(config: AnyBackendConfig | str | None, around: Surroundings) -> Choice:
    """What to use.

    Raises:
        ValueError: that cannot be used, or is nothing of the kind.
    """
    match config:
        case None:
            return _choose_without(around)
        case str():
            if not SERVER_URL.match(config):
                raise ValueError(f"backend_config is {config!r}, which is no URL of a server, such as http://host:8000")
            return Choice(name=None, why="as its URL says", server=ServerBackendConfig(url=config))
        case ServerBackendConfig():
            return Choice(name=None, why="as its ServerBackendConfig says", server=config)
        case LocalProcessBackendConfig():
            return Choice(name=LOCAL, why="as its LocalProcessBackendConfig says", workload=_cleaning(config))
        case ContainerBackendConfig():
            container = {
                "pull_policy": config.pull_policy,
                "auto_remove": config.auto_remove,
                **({"runtime": config.container_runtime} if config.container_runtime else {}),
            }
            asked = {"container_host": config.container_host, "container_runtime": config.container_runtime}
            return Choice(
                name=CONTAINER,
                why="as its ContainerBackendConfig says",
                engine={name: value for name, value in asked.items() if value},
                runtime_sources=tuple(config.runtime_source.sources),
                workload={"container": container},
                initializers={
                    "dataset": _fetching(config.dataset_initializer_image, config),
                    "model": _fetching(config.model_initializer_image, config),
                },
            )
        case KubernetesBackendConfig():
            raise ValueError(f"a KubernetesBackendConfig cannot be used: {NOT_YET}; {_REMEDY}")
    raise ValueError(
        "backend_config must be a LocalProcessBackendConfig, ContainerBackendConfig, ServerBackendConfig, "
        f"KubernetesBackendConfig, the URL of a server or None, not a {type(config).__name__}"
    )


def _fetching(image: str | None, config: ContainerBackendConfig) -> dict[str, Any]:
    return {"timeout_s": config.initializer_timeout, **({"image": image} if image is not None else {})}


def _choose_without(around: Surroundings) -> Choice:
    if around.environment.get(URL_VARIABLE):
        return Choice(name=None, why=f"as {URL_VARIABLE} says")
    if around.login:
        return Choice(name=None, why="as `trainmaster login` says")
    cluster = _cluster(around)
    if cluster is None:
        return _this_machine("as nothing else was named, and there is no Kubernetes cluster")
    if around.ask is None:
        raise ValueError(f"there is {cluster}, but {NOT_YET}; {_REMEDY}")
    if not around.ask(f"There is {cluster}, but {NOT_YET}. Run jobs on this machine instead? [y/N] "):
        raise ValueError(f"jobs cannot run on {cluster}: {NOT_YET}; {_REMEDY}")
    return _this_machine(f"as was agreed to: {NOT_YET}, to use {cluster}")


def _this_machine(why: str) -> Choice:
    """What jobs say is what `LocalProcessBackendConfig()` has them say; the backend stays the server's choice."""
    return Choice(name=None, why=why, workload=_cleaning(LocalProcessBackendConfig()))


def _cleaning(config: LocalProcessBackendConfig) -> dict[str, Any]:
    return {"remove_working_directory": True} if config.cleanup_venv else {}


def _cluster(around: Surroundings) -> str | None:
    """The cluster that Kubeflow's client would use."""
    if around.in_cluster:
        return "the Kubernetes cluster that this process runs in"
    named = [Path(part) for part in around.environment.get("KUBECONFIG", "").split(os.pathsep) if part]
    for path in named or [around.home / ".kube" / "config"]:
        context = _context(path)
        if context is not None:
            return f"the Kubernetes context {context!r} of {path}"
    return None


def _context(path: Path) -> str | None:
    try:
        document = parse_yaml(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError, YamlError):
        return None  # none that Kubeflow's client could use either
    context = document.get("current-context") if isinstance(document, Mapping) else None
    return str(context) if context else None


_answers: dict[str, bool] = {}
"""What a person has said in this process."""


def _ask_once(question: str) -> bool:
    if question not in _answers:
        _answers[question] = input(question).strip().lower() in ("y", "yes")
    return _answers[question]
