"""Where a client's jobs run: the argument of `TrainerClient`.

A wrong value, and a field that is not there, is pydantic's ValidationError, which is a ValueError.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from trainmaster.protocol.launch import PullPolicy

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
    """A Trainmaster server, which runs jobs on the backend that it is set up with."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a mistake beside the key would show the key

    url: Annotated[str, Field(pattern=f"^{SERVER_URL.pattern}")]
    api_key: str | None = Field(default=None, repr=False)
    """None: TRAINMASTER_API_KEY."""
    ca: str | None = None
    """A file with certificates to trust in place of the system's. None: TRAINMASTER_CA."""


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
    """A Kubernetes cluster."""

    namespace: str | None = None
    config_file: str | None = None
    """A kubeconfig. None: that of the environment, or the cluster that this process runs in."""
    context: str | None = None
    client_configuration: Annotated[Any, AfterValidator(_kubernetes_configuration)] = None
    """A `kubernetes.client.Configuration`, in place of the fields above."""


AnyBackendConfig = ServerBackendConfig | LocalProcessBackendConfig | ContainerBackendConfig | KubernetesBackendConfig
