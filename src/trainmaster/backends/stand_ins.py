"""Stand-ins for backends: one that is imported on first use, and one that is absent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from trainmaster.backends.base import Backend, Capabilities, LaunchError, Loss, claim_free_nodes
from trainmaster.protocol.processes import boot_id
from trainmaster.protocol.request import AttemptRequest, Control
from trainmaster.protocol.run_directory import RunDirectory
from trainmaster.protocol.secrets import Secrets
from trainmaster.server.core.reports import EngineFacts, Liveness
from trainmaster.server.core.resources import Node


class DeferredBackend:
    """Makes its backend on first use, and passes every call on to it.

    The first attempt opens the backend, and a marker file records that: the next server opens the backend when it
    starts, because something may be left to look after. A server that leaves nothing removes the marker.

    If its jobs run on the nodes of another backend (`nodes_of`), it reports none and need not be made for that.
    """

    def __init__(
        self,
        name: str,
        capabilities: Capabilities,
        make: Callable[[], Backend],
        *,
        used: Path,
        leaves_something: Callable[[], bool],
    ) -> None:
        self.name = name
        self.capabilities = capabilities
        self._make = make
        self._used = used
        self._leaves_something = leaves_something
        self._making = threading.Lock()
        self._backend: Backend | None = None
        self._opened = False

    def open(self) -> None:
        if self._used.exists():
            self._in_use()

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
        if self._opened and not self._leaves_something():
            self._used.unlink(missing_ok=True)

    def inventory(self) -> Sequence[Node]:
        return () if self.capabilities.nodes_of else self._made().inventory()

    def engine(self) -> EngineFacts | None:
        return self._made().engine()

    def render(self, request: AttemptRequest) -> str:
        return self._made().render(request)

    def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:
        backend = self._in_use()
        self._used.touch()  # another server of this directory may have taken it away
        return backend.submit(request, secrets)

    def observe(self, request: AttemptRequest) -> Sequence[Liveness]:
        return self._in_use().observe(request)

    def loss(self, request: AttemptRequest, node: int) -> Loss | None:
        return self._made().loss(request, node)

    def endpoint(self, request: AttemptRequest, node: int, host: str, port: int) -> str | None:
        return self._made().endpoint(request, node, host, port)

    def stop(self, request: AttemptRequest, control: Control) -> None:
        self._in_use().stop(request, control)

    def kill(self, request: AttemptRequest) -> None:
        self._in_use().kill(request)

    def revoke(self, request: AttemptRequest) -> None:
        self._in_use().revoke(request)

    def sweep(self, request: AttemptRequest, node: int) -> None:
        self._in_use().sweep(request, node)

    def _made(self) -> Backend:
        with self._making:
            if self._backend is None:
                self._backend = self._make()
            return self._backend

    def _in_use(self) -> Backend:
        backend = self._made()
        with self._making:
            if not self._opened:
                self._used.touch()
                backend.open()
                self._opened = True
        return backend


_log = logging.getLogger(__name__)


class UnavailableBackend:
    """Stands in for a backend that this server lacks but that jobs of an earlier server name.

    It starts nothing and says why; such jobs wait and do not block others. Running attempts continue: their files
    report progress and exit, but whether they are alive is unknown. If they ran on this machine (`runs_here`), a
    reboot has ended them.
    """

    def __init__(
        self,
        name: str,
        capabilities: Capabilities,
        run_directory: Callable[[AttemptRequest], RunDirectory],
        *,
        why: str,
    ) -> None:
        self.name = name
        self.capabilities = capabilities
        self._run_directory = run_directory
        self._why = why

    def open(self) -> None:
        """There is nothing to get ready."""

    def close(self) -> None:
        """There is nothing to let go of."""

    def inventory(self) -> Sequence[Node]:
        return ()

    def engine(self) -> EngineFacts | None:
        return None

    def render(self, request: AttemptRequest) -> str:  # noqa: ARG002 - nobody is told
        return self._why

    def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:  # noqa: ARG002 - nothing is started
        raise LaunchError(self._why)

    def observe(self, request: AttemptRequest) -> Sequence[Liveness]:
        return [self._liveness(request, node) for node in range(len(request.nodes))]

    def loss(self, request: AttemptRequest, node: int) -> Loss | None:  # noqa: ARG002 - there is no engine that knows
        return None

    def endpoint(self, request: AttemptRequest, node: int, host: str, port: int) -> str | None:  # noqa: ARG002
        return None

    def stop(self, request: AttemptRequest, control: Control) -> None:
        self._run_directory(request).set_control(control.to_json())

    def kill(self, request: AttemptRequest) -> None:
        """A log line instead of an error: another try would not reach anybody either."""
        _log.warning("%s cannot be ended by force: %s", request.attempt_id, self._why)

    def revoke(self, request: AttemptRequest) -> None:
        claim_free_nodes(self._run_directory(request), request)

    def sweep(self, request: AttemptRequest, node: int) -> None:
        """After a reboot nothing is left."""
        if self._liveness(request, node) is not Liveness.REBOOTED:
            raise LaunchError(self._why)

    def _liveness(self, request: AttemptRequest, node: int) -> Liveness:
        claimant = self._run_directory(request).claimant(node)
        if claimant is None:
            return Liveness.UNCLAIMED
        if claimant.get("revoked"):
            return Liveness.REVOKED
        rebooted = self.capabilities.runs_here and claimant.get("boot_id", boot_id()) != boot_id()
        return Liveness.REBOOTED if rebooted else Liveness.UNKNOWN
