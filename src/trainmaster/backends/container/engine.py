"""The container engine of this machine: found, and asked through docker's API, which podman answers too.

Nothing outside this package imports the client library.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from docker import APIClient
from docker.errors import APIError, DockerException, NotFound
from requests.exceptions import RequestException

from trainmaster.backends.container.libpod import CREATE, libpod_from

DOCKER, PODMAN = "docker", "podman"
_TIMEOUT_S = 30.0
_API_VERSION = "1.41"
"""Spoken by docker since 20.10 and by podman since 3.4."""
_NO_COMMAND = ("executable file not found", "no such file or directory", "command was not found", "permission denied")

_NO_DEVICE = ("cdi device", 'device driver "cdi"')
_NO_DEVICE_REMEDY = (
    "The engine does not know this GPU: `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` writes the "
    "specification (again, after the GPUs or their driver have changed); docker takes such names from version 25 on"
)


class EngineError(Exception):
    """The engine does not answer, or not as it should."""


class RefusedByEngineError(EngineError):
    """The engine will not do what it was asked to, however often."""


class NoSuchImageError(Exception):
    """There is no such image here, nor where it was looked for."""


class NoSuchCommandError(Exception):
    """The image has no such program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container of ours, as it was listed."""

    name: str
    state: str
    """As the engine calls it, such as `created`, `running`, `paused`, `exited`, `dead`."""
    labels: Mapping[str, str]

    @property
    def is_running(self) -> bool:
        """Whether it has processes."""
        return self.state == "running"

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it runs, or ever will."""
        return self.state in ("exited", "dead", "stopped", "removing")


class Engine:
    """One engine. Connected on first use, and again after it was away. For several threads."""

    def __init__(self, host: str = "", runtime: str = "") -> None:
        self._host = host
        self._runtime = runtime
        self._connecting = threading.Lock()
        self._client: APIClient | None = None
        self._version: Mapping[str, Any] = {}
        self._found_at = host

    @property
    def name(self) -> str:
        """`docker` or `podman`."""
        self._connected()
        return _name_of(self._version)

    @property
    def host(self) -> str:
        """Where it was found."""
        self._connected()
        return self._found_at

    @property
    def is_rootless(self) -> bool:
        """Whether root in a container is the engine's own user outside."""
        with self._asking() as client:
            options = client.info().get("SecurityOptions") or []
        return any("rootless" in option for option in options)

    def find_image(self, image: str) -> Mapping[str, Any]:
        """What the engine knows of an image that it has.

        Raises:
            NoSuchImageError: it has none of this name.
            EngineError: it does not answer.
        """
        with self._asking() as client:
            try:
                found: Mapping[str, Any] = client.inspect_image(image)
            except NotFound:
                raise NoSuchImageError(image) from None
            return found

    def pull(self, image: str) -> Iterator[Mapping[str, Any]]:
        """Fetch an image from its registry, for as long as that takes; what the engine says of it, as it comes.

        A failure is told as `error`. Credentials are those that the client finds in docker's configuration of this
        user, as it is now; podman has its own beside them.

        Raises:
            EngineError: the engine does not answer.
        """
        repository, tag = _parted(image)
        with self._asking() as client:
            client.reload_config()
            try:
                yield from client.pull(repository, tag=tag, stream=True, decode=True)
            except APIError as error:
                yield {"error": str(error.explanation or error)}

    def create(self, name: str, document: Mapping[str, Any]) -> None:
        """Create a container, in the place of one of this name that there is."""
        self.remove(name)
        with self._asking() as client:
            if self.name == PODMAN and document["HostConfig"].get("DeviceRequests"):
                answer = client.post(f"{client.base_url}{CREATE}", json=libpod_from(name, document), timeout=_TIMEOUT_S)
                if answer.status_code >= HTTPStatus.BAD_REQUEST:
                    is_final = answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR
                    raise _error(f"podman does not create the container: {answer.text}", is_final=is_final)
            else:
                client.create_container_from_config(dict(document), name=name)

    def start(self, name: str) -> None:
        """Start a container.

        Raises:
            NoSuchCommandError: its image has no such program.
            EngineError: the engine does not answer, or refuses.
        """
        with self._asking() as client:
            try:
                client.start(name)
            except APIError as error:
                said = str(error.explanation)
                if any(sign in said.lower() for sign in _NO_COMMAND):
                    raise NoSuchCommandError(said) from None
                raise

    def state(self, name: str) -> str | None:
        """The state of a container; None when there is none."""
        found = self._inspected(name)
        return str(found["Status"]) if found else None

    def process(self, name: str) -> int | None:
        """The first process of a container, as this machine numbers it; None when it does not run."""
        return int(self._inspected(name).get("Pid") or 0) or None

    def ran_out_of_memory(self, name: str) -> bool:
        """Whether the engine saw the kernel kill something in a container for want of memory. Not every one looks."""
        return bool(self._inspected(name).get("OOMKilled"))

    def wait(self, name: str, timeout_s: float | None = None) -> int:
        """The exit code of a container, once it has ended."""
        with self._asking() as client:
            # An explicit none, because the client's own limit would hold otherwise.
            answer = client.post(f"{client.base_url}/v{_API_VERSION}/containers/{name}/wait", timeout=timeout_s)
            answer.raise_for_status()
            return int(answer.json()["StatusCode"])

    def output(self, name: str, *, lines: int = 20) -> str:
        """The last lines that a container itself wrote."""
        with self._asking() as client:
            return bytes(client.logs(name, tail=lines)).decode(errors="replace").strip()

    def follow(self, name: str, channel: str) -> Iterator[bytes]:
        """What a container writes to `stdout` or `stderr`, from its start to its end."""
        with self._asking() as client:
            wanted = {"stdout": channel == "stdout", "stderr": channel == "stderr"}
            yield from client.logs(name, stream=True, follow=True, **wanted)

    def kill(self, name: str, signal: str = "SIGKILL") -> None:
        """Send a signal to a container; one that has ended, or is not there, is fine."""
        with self._asking() as client:
            try:
                client.kill(name, signal)
            except NotFound:
                return
            except APIError:
                # It may have ended meanwhile.
                if self.state(name) in ("running", "paused"):
                    raise

    def remove(self, name: str) -> None:
        """Remove a container, and end it first if it runs; none there is fine."""
        with self._asking() as client, contextlib.suppress(NotFound):
            client.remove_container(name, force=True, v=True)

    def containers(self, label: str) -> Sequence[Container]:
        """Every container with a label, running or not."""
        with self._asking() as client:
            listed = client.containers(all=True, filters={"label": [label]})
        return [
            Container(name=each["Names"][0].lstrip("/"), state=str(each["State"]), labels=each["Labels"] or {})
            for each in listed
        ]

    def create_network(self, document: Mapping[str, Any]) -> None:
        """Make a network, unless there is one of this name."""
        with self._asking() as client:
            if not any(found["Name"] == document["Name"] for found in client.networks(names=[document["Name"]])):
                client.create_network(
                    document["Name"],
                    driver=document["Driver"],
                    labels=document["Labels"],
                    options=document["Options"] if self.name == PODMAN else None,
                    check_duplicate=True,
                )

    def networks(self, label: str) -> Mapping[str, Mapping[str, str]]:
        """The labels of every network with a label, by its name."""
        with self._asking() as client:
            return {each["Name"]: each["Labels"] or {} for each in client.networks(filters={"label": [label]})}

    def remove_network(self, name: str) -> None:
        """Remove a network; none there is fine."""
        with self._asking() as client, contextlib.suppress(NotFound):
            client.remove_network(name)

    def close(self) -> None:
        """Let go of the connection."""
        with self._connecting:
            if self._client is not None:
                self._client.close()
                self._client = None

    def _inspected(self, name: str) -> Mapping[str, Any]:
        """What the engine tells of the state of a container; nothing when there is none."""
        with self._asking() as client:
            try:
                found: Mapping[str, Any] = client.inspect_container(name)["State"]
            except NotFound:
                return {}
            return found

    @contextlib.contextmanager
    def _asking(self) -> Iterator[APIClient]:
        """The client; what goes wrong with it is an EngineError."""
        try:
            yield self._connected()
        except DockerException as error:
            is_final = isinstance(error, APIError) and error.is_client_error()
            raise _error(str(getattr(error, "explanation", None) or error), is_final=is_final) from error
        except (RequestException, OSError) as error:
            self.close()  # whoever answers next may be another one
            said = _last_word(error)
            raise EngineError(f"the container engine at {self._found_at} does not answer: {said}") from error

    def _connected(self) -> APIClient:
        with self._connecting:
            if self._client is not None:
                return self._client
            tried = []
            for host in [self._host] if self._host else _hosts():
                try:
                    client = APIClient(base_url=host, version=_API_VERSION, timeout=_TIMEOUT_S)
                    version = client.version()
                except (DockerException, RequestException, OSError) as error:
                    tried.append(f"{host} ({_last_word(error)})")
                    continue
                if self._runtime and _name_of(version) != self._runtime:
                    tried.append(f"{host} (it is {_name_of(version)}, and not {self._runtime})")
                    client.close()
                    continue
                self._client, self._version, self._found_at = client, version, host
                return client
        raise EngineError(
            f"no container engine answers; tried {', '.join(tried)}. Start docker or podman (`podman system service`), "
            "or name its socket with the setting container_host"
        )


def _error(said: str, *, is_final: bool) -> EngineError:
    """What the engine said, as an error. That a GPU is not known to it, it says as if it were a fault of its own."""
    if any(sign in said.lower() for sign in _NO_DEVICE):
        return RefusedByEngineError(f"{said}. {_NO_DEVICE_REMEDY}")
    return (RefusedByEngineError if is_final else EngineError)(said)


def _hosts() -> list[str]:
    """Where engines listen, the likeliest first."""
    of_user = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    found = [os.environ.get("DOCKER_HOST"), os.environ.get("CONTAINER_HOST")]
    sockets = ["/var/run/docker.sock", f"{of_user}/docker.sock", "/run/podman/podman.sock"]
    found += [f"unix://{path}" for path in (*sockets, f"{of_user}/podman/podman.sock")]
    return list(dict.fromkeys(filter(None, found)))


def _name_of(version: Mapping[str, Any]) -> str:
    parts = [str(part.get("Name", "")) for part in version.get("Components") or ()]
    return PODMAN if any("podman" in part.lower() for part in parts) else DOCKER


def _parted(image: str) -> tuple[str, str | None]:
    """An image's repository and its tag or digest; `latest` where it names neither, not all that there are.

    >>> _parted("registry:5000/team/image"), _parted("image:1.2"), _parted("image@sha256:00")
    (('registry:5000/team/image', 'latest'), ('image', '1.2'), ('image@sha256:00', None))
    """
    if "@" in image:
        return image, None
    repository, colon, tag = image.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (image, "latest")


def _last_word(error: Exception) -> str:
    """The innermost reason of an error of the client library, which wraps them several times."""
    inner: BaseException = error
    while (deeper := inner.__cause__ or inner.__context__) is not None:
        inner = deeper
    return getattr(inner, "strerror", None) or str(inner)
