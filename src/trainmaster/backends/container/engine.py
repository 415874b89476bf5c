"""The container engine of this machine: found, and asked through docker's API, which podman answers too.

Nothing outside this package imports the client library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from docker import APIClient
from docker.errors import APIError, DockerException, NotFound
from requests import Response
from requests.exceptions import ReadTimeout, RequestException

from trainmaster.backends import BackendContext
from trainmaster.backends.container.connection import (
    API_VERSION,
    PODMAN,
    TIMEOUT_S,
    Connection,
    EngineAwayError,
    EngineError,
    last_word,
)
from trainmaster.backends.container.container_spec import CREATE, libpod_from
from trainmaster.protocol.launch import CONTAINER

__all__ = [
    "Container",
    "Engine",
    "EngineAwayError",
    "EngineError",
    "NoSuchCommandError",
    "NoSuchImageError",
    "RefusedByEngineError",
    "TookTooLongError",
    "engine_of",
    "has_ended",
]

_OUTPUT_BYTES = 16 << 10
_NO_COMMAND = ("not found", "no such file or directory", "permission denied")
_ENDED = ("exited", "dead", "stopped", "removing")

_NO_DEVICE = ("cdi device", 'device driver "cdi"')
_NO_DEVICE_REMEDY = (
    "The engine does not know this GPU: `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` writes the "
    "specification (again, after the GPUs or their driver have changed); docker takes such names from version 25 on"
)


class RefusedByEngineError(EngineError):
    """The engine will not do what it was asked to, however often."""


class TookTooLongError(EngineError):
    """A container has not ended in time."""


class NoSuchImageError(Exception):
    """There is no such image here, nor where it was looked for."""


class NoSuchCommandError(Exception):
    """The image has no such program, or none that can be run."""


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
        return has_ended(self.state)


def has_ended(state: str | None) -> bool:
    """Whether nothing of a container in this state runs, or ever will; there is one."""
    return state in _ENDED


class Engine:
    """One engine. For several threads."""

    def __init__(
        self, host: str = "", runtime: str = "", *, mark: Path | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Take the settings, the file that keeps which engine has the containers, and how long an answer may take."""
        self._connection = Connection(host, runtime, mark=mark, timeout_s=timeout_s)
        self._timeout_s = timeout_s

    @property
    def name(self) -> str:
        """`docker` or `podman`."""
        return self._connection.engine().name

    @property
    def host(self) -> str:
        """Where it was found."""
        return self._connection.engine().host

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
        self._connection.keep()
        with self._asking() as client:
            if self.name == PODMAN and document["HostConfig"].get("DeviceRequests"):
                wanted = libpod_from(name, document)
                _check(client.post(f"{client.base_url}{CREATE}", json=wanted, timeout=self._timeout_s))
            else:
                client.create_container_from_config(dict(document), name=name)

    def start(self, name: str) -> None:
        """Start a container.

        Raises:
            NoSuchCommandError: its image has no such program, or none that can be run.
            EngineError: the engine does not answer, or refuses.
        """
        with self._asking() as client:
            try:
                client.start(name)
            except APIError as error:
                said = str(error.explanation)
                if _is_about_program(said, str(client.inspect_container(name)["Path"])):
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

    def exit_code(self, name: str) -> int | None:
        """How a container ended; None when it runs, or there is none."""
        found = self._inspected(name)
        return int(found["ExitCode"]) if found and not found["Running"] else None

    def wait(self, name: str, timeout_s: float | None = None) -> int:
        """The exit code of a container, once it has ended.

        Raises:
            TookTooLongError: it has not ended in time.
            EngineError: the engine does not answer.
        """
        with self._asking() as client:
            try:
                # An explicit none, because the client's own limit would hold otherwise.
                answer = client.post(f"{client.base_url}/v{API_VERSION}/containers/{name}/wait", timeout=timeout_s)
            except ReadTimeout:
                raise TookTooLongError(f"{name} has not ended after {timeout_s} s") from None
            _check(answer)
            return int(answer.json()["StatusCode"])

    def output(self, name: str, *, lines: int = 20) -> str:
        """The last lines that a container itself wrote, or the beginning of them: it may have written anything."""
        with self._asking() as client:
            place = f"{client.base_url}/v{API_VERSION}/containers/{name}/logs"
            wanted = {"stdout": 1, "stderr": 1, "tail": lines}
            # Not by the library, which would take all of it into memory, or wait for it without limit.
            with client.get(place, params=wanted, stream=True, timeout=self._timeout_s) as answer:
                _check(answer)
                written = answer.raw.read(_OUTPUT_BYTES)
        return _unframed(written).decode(errors="replace").strip()

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
        self._connection.keep()
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

    def disconnect(self, network: str, name: str) -> None:
        """Take a container out of a network; neither there is fine."""
        with self._asking() as client, contextlib.suppress(NotFound):
            client.disconnect_container_from_network(name, network, force=True)

    def remove_network(self, name: str) -> None:
        """Remove a network; none there is fine."""
        with self._asking() as client, contextlib.suppress(NotFound):
            client.remove_network(name)

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()

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
            yield self._connection.client()
        except DockerException as error:
            is_final = isinstance(error, APIError) and error.is_client_error()
            raise _error(str(getattr(error, "explanation", None) or error), is_final=is_final) from error
        except (RequestException, OSError) as error:
            self.close()
            raise EngineAwayError(f"the container engine at {self.host} does not answer: {last_word(error)}") from error


def engine_of(context: BackendContext, *, timeout_s: float = TIMEOUT_S) -> Engine:
    """The engine of a server."""
    mark = context.data_dir / f"{CONTAINER}.used"
    return Engine(context.container.host, context.container.runtime, mark=mark, timeout_s=timeout_s)


def _unframed(written: bytes) -> bytes:
    """What a container without a terminal wrote: engines send each part after eight bytes, the last four its size."""
    said = b""
    while written:
        size = int.from_bytes(written[4:8])
        said += written[8 : 8 + size]
        written = written[8 + size :]
    return said


def _is_about_program(said: str, program: str) -> bool:
    """Whether an engine says that there is no such program; not of a mount, say, or of its own runtime.

    >>> _is_about_program('exec: "python3": executable file not found in $PATH', "python3")
    True
    >>> _is_about_program("crun: executable file `python3` not found in $PATH: No such file or directory", "python3")
    True
    >>> _is_about_program("statfs /data/python3: no such file or directory", "python3")
    False
    """
    told = said.replace("\\", "")
    is_named = any(f"{mark}{program}{mark}" in told for mark in "\"'`")
    return is_named and any(sign in told.lower() for sign in _NO_COMMAND)


def _check(answer: Response) -> None:
    """See that the engine did what it was asked to, where the library does not."""
    if answer.status_code >= HTTPStatus.BAD_REQUEST:
        raise _error(answer.text.strip(), is_final=answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR)


def _error(said: str, *, is_final: bool) -> EngineError:
    """What the engine said, as an error. That a GPU is not known to it, it says as if it were a fault of its own."""
    if any(sign in said.lower() for sign in _NO_DEVICE):
        return RefusedByEngineError(f"{said}. {_NO_DEVICE_REMEDY}")
    return (RefusedByEngineError if is_final else EngineError)(said)


def _parted(image: str) -> tuple[str, str | None]:
    """An image's repository and its tag or digest; `latest` where it names neither, not all that there are.

    >>> _parted("registry:5000/team/image"), _parted("image:1.2"), _parted("image@sha256:00")
    (('registry:5000/team/image', 'latest'), ('image', '1.2'), ('image@sha256:00', None))
    """
    if "@" in image:
        return image, None
    repository, colon, tag = image.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (image, "latest")
