"""The server that a client connects to, and the backend on which its jobs run.

A configuration, the argument of `TrainerClient`, is used or refused; a wrong value or field in it is pydantic's
ValidationError, which is a ValueError. Without one this module decides; `ChosenBackend` has what was chosen, and why.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from trainmaster import client as api
from trainmaster.client import local
from trainmaster.client.server_lookup import URL_VARIABLE, load_login
from trainmaster.client.types import Engine
from trainmaster.protocol.launch import CONTAINER, LOCAL, PullPolicy
from trainmaster.trainer.kubernetes_cluster import (
    SERVICE_ACCOUNT,
    WantedCluster,
    cluster_of_configuration,
    declare,
    find_cluster,
)

RUNTIME_SOURCE = re.compile(r"github://[^\s/]+/\S+|https?://\S+|file:///\S.*|/.*", re.DOTALL)
SERVER_URL = re.compile(r"https?://[^\s/]+")


def _as_written(value: object) -> object:
    """Pull policies are taken in any case, as Kubeflow takes them."""
    return next((policy.value for policy in PullPolicy if str(value).lower() == policy.lower()), value)


def _known_source(source: str) -> str:
    if not RUNTIME_SOURCE.fullmatch(source):
        raise ValueError(
            "a runtime source is github://OWNER/REPOSITORY, http(s)://..., file:///... or an absolute path"
        )
    return source


def _kubernetes_configuration(value: object) -> object:
    # By name, as the kubernetes package need not be installed to say that something else is not of it.
    names = {f"{each.__module__.partition('.')[0]}.{each.__name__}" for each in type(value).__mro__}
    if value is not None and "kubernetes.Configuration" not in names:
        raise ValueError("must be a kubernetes.client.Configuration")
    return value


INITIALIZER_TIMEOUT_S = 600
"""The default, as in Kubeflow's client."""


class BackendConfig(BaseModel):
    """What all of them share: a misspelt field is an error, and so is a wrong value that is set later."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class ServerBackendConfig(BackendConfig):
    """A Trainmaster server, and where it runs jobs."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a mistake beside the key would show the key

    url: Annotated[str, Field(pattern=f"^{SERVER_URL.pattern}")]
    api_key: str | None = Field(default=None, repr=False)
    """None: TRAINMASTER_API_KEY."""
    ca: str | None = None
    """A file with certificates to trust in place of the system's. None: TRAINMASTER_CA."""
    backend: str | None = None
    """One of its backends, such as a cluster. None: its default."""


class LocalProcessBackendConfig(BackendConfig):
    """Processes of this machine."""

    cleanup_venv: bool = True
    """Remove the job's own directory when it has ended. The environments that jobs share stay."""


class TrainingRuntimeSource(BackendConfig):
    """Where runtimes are looked for, in order; the built-in ones come last."""

    sources: list[Annotated[str, AfterValidator(_known_source)]] = Field(default_factory=list)
    """`github://OWNER/REPOSITORY[/PATH]`, `http(s)://...`, `file:///...` or an absolute path of a file or directory.
    None by default, so that nothing is fetched unasked; Kubeflow reads its own repository on GitHub."""


class ContainerBackendConfig(BackendConfig):
    """Containers of docker or podman."""

    pull_policy: Annotated[Literal["Always", "IfNotPresent", "Never"], BeforeValidator(_as_written)] = "IfNotPresent"
    auto_remove: bool = True
    """Remove containers of jobs that have ended; their logs and results stay."""
    container_host: str | None = None
    """Where the engine listens, such as `unix:///run/podman/podman.sock`: the local server is started with it, and one
    that runs has to use it. None: whichever the server uses."""
    container_runtime: Literal["docker", "podman"] | None = None
    """Which engine that has to be. None: any."""
    runtime_source: TrainingRuntimeSource = Field(default_factory=TrainingRuntimeSource)
    dataset_initializer_image: str | None = None
    """An image that fetches the dataset by its own command, as Kubeflow's does. None: our own initializer, in the job's
    image."""
    model_initializer_image: str | None = None
    """The same for the model."""
    initializer_timeout: Annotated[int, Field(ge=1)] = INITIALIZER_TIMEOUT_S
    """Seconds that each initializer may take; one that takes longer is ended, and its attempt may be tried again."""


class KubernetesBackendConfig(BackendConfig):
    """A namespace of a Kubernetes cluster, of which the server learns where it does not know it."""

    namespace: str | None = None
    """None: that of the context."""
    config_file: str | None = None
    """A kubeconfig. None: the cluster that this process runs in, else that of KUBECONFIG or `~/.kube/config`."""
    context: str | None = None
    """A context of the kubeconfig. None: its current one."""
    client_configuration: Annotated[Any, AfterValidator(_kubernetes_configuration)] = None
    """A `kubernetes.client.Configuration`, in place of a kubeconfig."""


AnyBackendConfig = ServerBackendConfig | LocalProcessBackendConfig | ContainerBackendConfig | KubernetesBackendConfig

_REMEDY = (
    "to run on this machine, pass LocalProcessBackendConfig() or ContainerBackendConfig(); for a server elsewhere, "
    f"pass ServerBackendConfig(url=...) or set {URL_VARIABLE}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen, before anything was asked of a server."""

    name: str | None
    """The server's backend that jobs name; None: its own choice."""
    why: str
    server: ServerBackendConfig | None = None
    """None: the configured server, or the local one."""
    cluster: WantedCluster | None = None
    """The Kubernetes cluster whose backend jobs name, in place of `name`."""
    remedy: str = ""
    """What to do if that cannot be used: nobody asked for it by name."""
    engine: Mapping[str, str] = field(default_factory=dict)
    """What was asked of the engine, as settings of a server: `container_host`, `container_runtime`."""
    runtime_sources: tuple[str, ...] = ()
    workload: Mapping[str, Any] = field(default_factory=dict)
    initializers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What every `dataset` and every `model` that is fetched says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenBackend:
    """Where a client's jobs run."""

    url: str
    name: str | None
    """The backend of it that they name; None: the server's own choice."""
    why: str
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
    login: str | None = None
    """The URL of the server that `trainmaster login` saved."""


def surroundings() -> Surroundings:
    return Surroundings(
        environment=os.environ,
        home=Path.home(),
        in_cluster="KUBERNETES_SERVICE_HOST" in os.environ and (SERVICE_ACCOUNT / "token").exists(),
        login=saved.url if (saved := load_login()) else None,
    )


def choose(config: AnyBackendConfig | str | None, around: Surroundings) -> Choice:
    """What to use; raises ValueError if that cannot be used, or is nothing of the kind."""
    match config:
        case None:
            return _choose_without(around)
        case str():
            if not SERVER_URL.match(config):
                raise ValueError(
                    f"backend_config is {config!r}, which is not the URL of a server, such as http://host:8000"
                )
            return Choice(name=None, why="as its URL says", server=ServerBackendConfig(url=config))
        case ServerBackendConfig():
            return Choice(name=config.backend, why="as its ServerBackendConfig says", server=config)
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
            return Choice(name=None, why="as its KubernetesBackendConfig says", cluster=_cluster_of(config, around))
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
    try:
        cluster = find_cluster(environment=around.environment, home=around.home, in_cluster=around.in_cluster)
    except ValueError as error:
        raise ValueError(f"{error}; {_REMEDY}") from error
    if cluster is None:
        return _this_machine("as nothing else was named, and there is no Kubernetes cluster")
    return Choice(name=None, why=f"as there is {cluster.shown}", cluster=cluster, remedy=_REMEDY)


def _cluster_of(config: KubernetesBackendConfig, around: Surroundings) -> WantedCluster:
    if config.client_configuration is not None:
        if config.config_file is not None or config.context is not None:
            raise ValueError("client_configuration stands in place of config_file and context: leave these out")
        return cluster_of_configuration(config.client_configuration, config.namespace)
    found = find_cluster(
        environment=around.environment,
        home=around.home,
        in_cluster=around.in_cluster,
        config_file=config.config_file,
        context=config.context,
        namespace=config.namespace,
    )
    if found is None:
        raise ValueError(
            "there is no kubeconfig with a current context in KUBECONFIG or ~/.kube/config, and this process does not "
            "run in a Kubernetes cluster: name a file as config_file"
        )
    return found


def _this_machine(why: str) -> Choice:
    """What jobs say is what `LocalProcessBackendConfig()` has them say; the backend stays the server's choice."""
    return Choice(name=None, why=why, workload=_cleaning(LocalProcessBackendConfig()))


def _cleaning(config: LocalProcessBackendConfig) -> dict[str, Any]:
    return {"remove_working_directory": True} if config.cleanup_venv else {}


_VARIABLES = ("DOCKER_HOST", "CONTAINER_HOST")
"""Where a server looks for an engine; as they were when it was started."""
_ANEW = (
    "have the server started with it when no job runs in a container: `trainmaster down` stops the local one, and the "
    "next client starts it"
)


def connect(choice: Choice, around: Surroundings) -> tuple[api.Client, ChosenBackend]:
    """A client of the server that was chosen, and where its jobs run; the local one is started when none runs.

    Raises ClientError if the server cannot be used, ValueError if it lacks the backend or has another engine than was
    asked for, and RuntimeError if no engine answers.
    """
    started: local.LocalServer | None = None
    if choice.engine and choice.server is None and not around.environment.get(URL_VARIABLE) and not around.login:
        found = local.find()
        started = found or local.start(settings=choice.engine)
        if found is not None or not local.started_here(started):
            started = None
    server = choice.server
    client = api.Client(server.url, server.api_key, ca=server.ca) if server is not None else api.Client()
    try:
        own = local.running()
        here = own is not None and own.url == client.url
        name = _checked_name(choice, client, around, here=here)
    except api.NotFoundError as error:
        client.close()
        raise ValueError(str(error)) from error
    except BaseException:
        client.close()
        # Others would find it with an engine that does not answer; the next client starts one with what it asks for.
        if started is not None and local.running() == started:
            local.stop()
        raise
    return client, ChosenBackend(url=client.url, name=name, why=choice.why, this_machine=here)


def _checked_name(choice: Choice, client: api.Client, around: Surroundings, *, here: bool) -> str | None:
    """The server's backend, which is there, and whose engine is the one that was asked for."""
    if choice.cluster is not None:
        try:
            return declare(client, choice.cluster, here=here)
        except (ValueError, RuntimeError) as error:
            if not choice.remedy:
                raise
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            raise kind(f"{error}; {choice.remedy}") from error
    if choice.name is not None:
        check_engine(choice.engine, client.cluster.backend(choice.name)["engine"], around.environment)
    return choice.name


def check_engine(asked: Mapping[str, str], engine: Engine | None, environment: Mapping[str, str]) -> None:
    """See that the engine of a server is the one that was asked for: ValueError if not, RuntimeError if none answers.

    `asked` has `container_host` and `container_runtime`, where they matter. `environment` is that of this process,
    whose variables the server need not have.
    """
    if engine is None:
        return
    host, runtime = asked.get("container_host"), asked.get("container_runtime")
    if engine["problem"]:
        known = {"container_host": host, **{name: environment.get(name) for name in _VARIABLES}}
        untried = [f"{name} {value}" for name, value in known.items() if value and value not in engine["problem"]]
        hint = f". It did not try {untried[0]}: {_ANEW}" if untried else ""
        raise RuntimeError(f"{engine['problem']}{hint}")
    used = f"the server uses {engine['name']} at {engine['host']}; leave it out, or {_ANEW}"
    if runtime and runtime != engine["name"]:
        raise ValueError(f"container_runtime is {runtime}, and {used}")
    if host and _socket(host) != _socket(engine["host"] or ""):
        raise ValueError(f"container_host is {host}, and {used}")


def _socket(host: str) -> str:
    """A host, however it is written: links to a socket lead to the same engine."""
    scheme, _, path = host.rpartition("://")
    return os.path.realpath(f"/{path.lstrip('/')}") if scheme in ("", "unix", "http+unix") else host.rstrip("/")
