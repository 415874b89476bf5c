"""Finding the container engine of this machine, and staying with the one that was found."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docker import APIClient
from docker.errors import DockerException
from requests import PreparedRequest, Response
from requests.exceptions import RequestException

from trainmaster.protocol.documents import read_document, write_document

DOCKER, PODMAN = "docker", "podman"
API_VERSION = "1.41"
"""Supported by docker since 20.10 and by podman since 3.4."""
TIMEOUT_S = 30.0
_CONNECT_TIMEOUT_S = 3.0
"""For the first answer, which costs an engine nothing; other threads wait meanwhile."""
_AWAY_S = 2.0
"""An engine that did not answer is not asked again for this long: waiting threads get the same error."""
_SILENT_S = 1800.0
"""A pull without progress for this long waits for a registry that has forgotten it. Unpacking a large layer is
silent for minutes, too."""


class ContainerEngineError(Exception):
    """The engine does not answer, or not as it should."""


class EngineAwayError(ContainerEngineError):
    """The engine does not answer."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The engine that has the containers."""

    host: str
    name: str


class EngineConnection:
    """A connection to one engine, made on first use, and again after an outage. Thread-safe.

    Once an engine has answered, no other is used: there, running jobs would seem to be gone. That also holds for the
    next server, if containers were made, unless the settings name another engine.
    """

    def __init__(
        self, host: str = "", runtime: str = "", *, mark: Path | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        """`mark`: the file that records which engine has the containers."""
        self._timeout_s = timeout_s
        self._host = host
        self._runtime = runtime
        self._mark = mark
        self._connecting = threading.Lock()
        self._client: APIClient | None = None
        self._known = self._marked()
        self._away: tuple[float, str] = (float("-inf"), "")
        """When it last did not answer, and what was tried."""

    def close(self) -> None:
        client, self._client = self._client, None  # without the lock, which is held while an engine that hangs is asked
        if client is not None:
            client.close()

    def engine(self) -> _Known:
        if self._known is None:
            self.client()
        assert self._known is not None, "set by whoever connects, and never unset"
        return self._known

    def client(self) -> APIClient:
        """Raises EngineAwayError if the engine does not answer."""
        with self._connecting:
            if (client := self._client) is not None:
                return client
            away_at, why = self._away
            if time.monotonic() - away_at < _AWAY_S:
                raise EngineAwayError(why)
            tried = []
            wanted_host = self._known.host if self._known else self._host
            for host in [wanted_host] if wanted_host else _hosts():
                try:
                    client, found = _asked(host)
                except (DockerException, RequestException, OSError) as error:
                    tried.append(f"{host} ({last_word(error)})")
                    continue
                wanted = self._known.name if self._known else self._runtime
                if wanted and found != wanted:
                    tried.append(f"{host} (it is {found}, and not {wanted})")
                    client.close()
                    continue
                client.timeout = self._timeout_s
                self._client, self._known = client, _Known(host, found)
                return client
            self._away = time.monotonic(), self._not_found(tried)
            raise EngineAwayError(self._away[1])

    def _not_found(self, tried: list[str]) -> str:
        if self._known:
            return (
                f"{self._known.name}, which has this server's containers, does not answer; tried {', '.join(tried)}. "
                "Start it; to have another engine, name its socket with the setting container_host"
            )
        return (
            f"no container engine answers; tried {', '.join(tried)}. Start docker or podman (`podman system service`), "
            "or name its socket with the setting container_host"
        )

    def _marked(self) -> _Known | None:
        """The engine of an earlier server, unless the settings name another."""
        told = (read_document(self._mark) if self._mark else None) or {}
        if "host" not in told or "name" not in told:
            return None  # nobody made any container
        known = _Known(str(told["host"]), str(told["name"]))
        return known if self._host in ("", known.host) and self._runtime in ("", known.name) else None

    def keep(self) -> None:
        """Record which engine has containers."""
        known = self.engine()
        if self._mark is not None and self._marked() != known:
            write_document(self._mark, {"host": known.host, "name": known.name})


_UNIX = "unix://"


class _Client(APIClient):  # type: ignore[misc]
    """Limits the time of pulls, where the library has no limit, and leaves no socket open if nobody listens."""

    def __init__(self, host: str) -> None:
        super().__init__(base_url=host, version=API_VERSION, timeout=_CONNECT_TIMEOUT_S)
        self._path = host.removeprefix(_UNIX) if host.startswith(_UNIX) else None

    def send(self, request: PreparedRequest, **how: Any) -> Response:
        if self._path is not None:
            # Connect and close: the library never closes a socket that it could not connect.
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(_CONNECT_TIMEOUT_S)
                probe.connect(self._path)
        if how.get("timeout") is None and request.path_url.partition("?")[0].endswith("/images/create"):
            how["timeout"] = _SILENT_S
        answer: Response = super().send(request, **how)
        return answer


def _asked(host: str) -> tuple[APIClient, str]:
    client = _Client(host)
    try:
        # The cheapest request: for its version, podman runs other programs, which takes seconds on a busy machine.
        answer = client.get(f"{client.base_url}/_ping", timeout=_CONNECT_TIMEOUT_S)
        answer.raise_for_status()
        return client, PODMAN if "Libpod-API-Version" in answer.headers else DOCKER
    except BaseException:
        client.close()
        raise


def _hosts() -> list[str]:
    of_user = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    found = [os.environ.get("DOCKER_HOST"), os.environ.get("CONTAINER_HOST")]
    sockets = ["/var/run/docker.sock", f"{of_user}/docker.sock", "/run/podman/podman.sock"]
    found += [f"{_UNIX}{path}" for path in (*sockets, f"{of_user}/podman/podman.sock")]
    return list(dict.fromkeys(filter(None, found)))


def last_word(error: Exception) -> str:
    """The innermost message of an error of the client library, which wraps errors several times."""
    inner: BaseException = error
    while (deeper := inner.__cause__ or inner.__context__) is not None:
        inner = deeper
    return getattr(inner, "strerror", None) or str(inner)
