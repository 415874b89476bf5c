"""The container engine of this machine, asked through docker's API, which podman implements, too.

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
from trainmaster.backends.container.connection import API_VERSION, PODMAN, TIMEOUT_S, EngineConnection, last_word
from trainmaster.backends.container.connection import ContainerEngineError as ContainerEngineError
from trainmaster.backends.container.connection import EngineAwayError as EngineAwayError
from trainmaster.backends.container.container_spec import CREATE, libpod_from
from trainmaster.protocol.launch import CONTAINER

_OUTPUT_BYTES = 16 << 10
_NO_COMMAND = ("not found", "no such file or directory", "permission denied")
_ENDED = ("exited", "dead", "stopped", "removing")

_NO_DEVICE = ("cdi device", 'device driver "cdi"')
_NO_DEVICE_REMEDY = (
    "The engine does not know this GPU: `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` writes the "
    "specification (again, after the GPUs or their driver have changed); docker takes such names from version 25 on"
)


class RefusedByEngineError(ContainerEngineError):
    """The engine will never do what it was asked to."""


class TookTooLongError(ContainerEngineError):
    """A container has not ended in time."""


class NoSuchImageError(Exception):
    pass


class NoSuchCommandError(Exception):
    """The image has no such program, or none that can be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    name: str
    state: str
    """The engine's word, such as `created`, `running`, `paused`, `exited`, `dead`."""
    labels: Mapping[str, str]

    @property
    def has_ended(self) -> bool:
        return has_ended(self.state)


def has_ended(state: str | None) -> bool:
    """Whether nothing of a container in this state runs, or ever will."""
    return state in _ENDED


class ContainerEngine:
    """One engine. Thread-safe."""

    def __init__(
        self, host: str = "", runtime: str = "", *, mark: Path | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """`mark`: the file that records which engine has the containers."""
        self._connection = EngineConnection(host, runtime, mark=mark, timeout_s=timeout_s)
        self._timeout_s = timeout_s

    @property
    def name(self) -> str:
        return self._connection.engine().name

    @property
    def host(self) -> str:
        return self._connection.engine().host

    @property
    def is_rootless(self) -> bool:
        """Whether root in a container is the engine's own user outside."""
        with self._asking() as client:
            options = client.info().get("SecurityOptions") or []
        return any("rootless" in option for option in options)

    def find_image(self, image: str) -> Mapping[str, Any]:
        """What the engine knows of an image; raises NoSuchImageError if it has none of this name."""
        with self._asking() as client:
            try:
                found: Mapping[str, Any] = client.inspect_image(image)
            except NotFound:
                raise NoSuchImageError(image) from None
            return found

    def pull(self, image: str) -> Iterator[Mapping[str, Any]]:
        """Fetch an image from its registry; yields the engine's progress messages.

        A failure is a message with `error`. Credentials come from docker's current configuration of this user; podman
        has its own in addition.
        """
        repository, tag = _parted(image)
        with self._asking() as client:
            client.reload_config()
            try:
                yield from client.pull(repository, tag=tag, stream=True, decode=True)
            except APIError as error:
                yield {"error": str(error.explanation or error)}

    def create(self, name: str, document: Mapping[str, Any]) -> None:
        self.remove(name)
        self._connection.keep()
        with self._asking() as client:
            if self.name == PODMAN and document["HostConfig"].get("DeviceRequests"):
                wanted = libpod_from(name, document)
                _check(client.post(f"{client.base_url}{CREATE}", json=wanted, timeout=self._timeout_s))
            else:
                client.create_container_from_config(dict(document), name=name)

    def start(self, name: str) -> None:
        """Start a container; raises NoSuchCommandError if its image has no such program, or none that can be run."""
        with self._asking() as client:
            try:
                client.start(name)
            except APIError as error:
                said = str(error.explanation)
                if _is_about_program(said, str(client.inspect_container(name)["Path"])):
                    raise NoSuchCommandError(said) from None
                raise

    def state(self, name: str) -> str | None:
        """None if there is no such container."""
        found = self._inspected(name)
        return str(found["Status"]) if found else None

    def process(self, name: str) -> int | None:
        """The first process of a container, as a pid of this machine; None if it does not run."""
        return int(self._inspected(name).get("Pid") or 0) or None

    def ran_out_of_memory(self, name: str) -> bool:
        """Whether the engine saw an out-of-memory kill in a container. Not every engine looks."""
        return bool(self._inspected(name).get("OOMKilled"))

    def exit_code(self, name: str) -> int | None:
        """None if it runs, or there is no such container."""
        found = self._inspected(name)
        return int(found["ExitCode"]) if found and not found["Running"] else None

    def wait(self, name: str, timeout_s: float | None = None) -> int:
        """Wait for the end of a container; returns its exit code. Raises TookTooLongError if it takes longer."""
        with self._asking() as client:
            try:
                # Explicit, because the client's own limit would apply otherwise.
                answer = client.post(f"{client.base_url}/v{API_VERSION}/containers/{name}/wait", timeout=timeout_s)
            except ReadTimeout:
                raise TookTooLongError(f"{name} has not ended after {timeout_s} s") from None
            _check(answer)
            return int(answer.json()["StatusCode"])

    def output(self, name: str, *, lines: int = 20) -> str:
        """The last lines of a container's output, cut to a limit: it may have written anything."""
        with self._asking() as client:
            place = f"{client.base_url}/v{API_VERSION}/containers/{name}/logs"
            wanted = {"stdout": 1, "stderr": 1, "tail": lines}
            # The library would read all of it into memory, or wait for it without limit.
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
        """Send a signal to a container, if it still runs."""
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
        with self._asking() as client, contextlib.suppress(NotFound):
            client.remove_container(name, force=True, v=True)

    def containers(self, label: str) -> Sequence[Container]:
        with self._asking() as client:
            listed = client.containers(all=True, filters={"label": [label]})
        return [
            Container(name=each["Names"][0].lstrip("/"), state=str(each["State"]), labels=each["Labels"] or {})
            for each in listed
        ]

    def create_network(self, document: Mapping[str, Any]) -> None:
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
        with self._asking() as client:
            return {each["Name"]: each["Labels"] or {} for each in client.networks(filters={"label": [label]})}

    def disconnect(self, network: str, name: str) -> None:
        with self._asking() as client, contextlib.suppress(NotFound):
            client.disconnect_container_from_network(name, network, force=True)

    def remove_network(self, name: str) -> None:
        with self._asking() as client, contextlib.suppress(NotFound):
            client.remove_network(name)

    def close(self) -> None:
        self._connection.close()

    def _inspected(self, name: str) -> Mapping[str, Any]:
        with self._asking() as client:
            try:
                found: Mapping[str, Any] = client.inspect_container(name)["State"]
            except NotFound:
                return {}
            return found

    @contextlib.contextmanager
    def _asking(self) -> Iterator[APIClient]:
        """The client; its errors become EngineErrors."""
        try:
            yield self._connection.client()
        except DockerException as error:
            is_final = isinstance(error, APIError) and error.is_client_error()
            raise _error(str(getattr(error, "explanation", None) or error), is_final=is_final) from error
        except (RequestException, OSError) as error:
            self.close()
            raise EngineAwayError(f"the container engine at {self.host} does not answer: {last_word(error)}") from error


def engine_of(context: BackendContext, *, timeout_s: float = TIMEOUT_S) -> ContainerEngine:
    mark = context.data_dir / f"{CONTAINER}.used"
    return ContainerEngine(context.container.host, context.container.runtime, mark=mark, timeout_s=timeout_s)


def _unframed(written: bytes) -> bytes:
    """A container's output without the frames of the stream: eight bytes before each part, the last four its size."""
    said = b""
    while written:
        size = int.from_bytes(written[4:8])
        said += written[8 : 8 + size]
        written = written[8 + size :]
    return said


def _is_about_program(said: str, program: str) -> bool:
    """Whether an engine says that there is no such program, and not, for example, no such mount or runtime.

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
    """Raise the engine's error, where the library does not."""
    if answer.status_code >= HTTPStatus.BAD_REQUEST:
        raise _error(answer.text.strip(), is_final=answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR)


def _error(said: str, *, is_final: bool) -> ContainerEngineError:
    """The engine's message as an error. Engines report an unknown GPU as if it were their own fault."""
    if any(sign in said.lower() for sign in _NO_DEVICE):
        return RefusedByEngineError(f"{said}. {_NO_DEVICE_REMEDY}")
    return (RefusedByEngineError if is_final else ContainerEngineError)(said)


def _parted(image: str) -> tuple[str, str | None]:
    """An image's repository and its tag or digest; `latest` if it names neither: docker would pull all tags.

    >>> _parted("registry:5000/team/image"), _parted("image:1.2"), _parted("image@sha256:00")
    (('registry:5000/team/image', 'latest'), ('image', '1.2'), ('image@sha256:00', None))
    """
    if "@" in image:
        return image, None
    repository, colon, tag = image.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (image, "latest")
