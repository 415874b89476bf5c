"""A backend that is not imported before it is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from trainmaster.backends.base import Backend, Capabilities
from trainmaster.protocol.request import AttemptRequest, Control
from trainmaster.protocol.secrets import Secrets
from trainmaster.server.core.reports import EngineFacts, Liveness
from trainmaster.server.core.resources import Node


class DeferredBackend:
    """Stands for a backend until somebody asks something of it; then makes it, and passes every verb on.

    It is opened for the first attempt. A mark on disk tells of that, so that the next server opens it at its start:
    something may be left to look after. A server that leaves nothing takes the mark away.

    Its nodes are those of another backend (`host_backend`), which reports them.
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
        """Open it now, where it was used before."""
        if self._used.exists():
            self._in_use()

    def close(self) -> None:
        """Let go of what it has."""
        if self._backend is not None:
            self._backend.close()
        if self._opened and not self._leaves_something():
            self._used.unlink(missing_ok=True)

    def inventory(self) -> Sequence[Node]:
        """None of its own."""
        return ()

    def engine(self) -> EngineFacts | None:
        """What runs its jobs."""
        return self._made().engine()

    def render(self, request: AttemptRequest) -> str:
        """The document for the engine."""
        return self._made().render(request)

    def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:
        """Start the workers of an attempt."""
        backend = self._in_use()
        self._used.touch()  # another server of this directory may have taken it away
        return backend.submit(request, secrets)

    def observe(self, request: AttemptRequest) -> Sequence[Liveness]:
        """What is known of each node's worker."""
        return self._in_use().observe(request)

    def endpoint(self, request: AttemptRequest, node: int, host: str, port: int) -> str | None:
        """Where the server reaches a service."""
        return self._made().endpoint(request, node, host, port)

    def stop(self, request: AttemptRequest, control: Control) -> None:
        """Pass a control on to the workers."""
        self._in_use().stop(request, control)

    def kill(self, request: AttemptRequest) -> None:
        """End workers by force."""
        self._in_use().kill(request)

    def revoke(self, request: AttemptRequest) -> None:
        """See to it that nodes which no worker has claimed never run."""
        self._in_use().revoke(request)

    def sweep(self, request: AttemptRequest, node: int) -> None:
        """Kill whatever is left of a node."""
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
