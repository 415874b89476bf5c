"""A backend that a server does not have, in the place of which jobs of an earlier server still stand."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence

from trainmaster.backends.base import Capabilities, LaunchError
from trainmaster.protocol.processes import boot_id
from trainmaster.protocol.request import AttemptRequest, Control
from trainmaster.protocol.run_directory import RunDirectory
from trainmaster.protocol.secrets import Secrets
from trainmaster.server.core.reports import EngineFacts, Liveness
from trainmaster.server.core.resources import Node

_log = logging.getLogger(__name__)


class AbsentBackend:
    """Starts nothing, and says why: such jobs wait, and hold up no others.

    What runs goes on. Its files tell of it, and of its end; whether it is alive is not known before the machine was
    booted again.
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
        """None."""
        return ()

    def engine(self) -> EngineFacts | None:
        """None."""
        return None

    def render(self, request: AttemptRequest) -> str:  # noqa: ARG002 - nobody is told
        """Why there is nothing to be seen."""
        return self._why

    def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:  # noqa: ARG002 - nothing is started
        """Start nothing."""
        raise LaunchError(self._why)

    def observe(self, request: AttemptRequest) -> Sequence[Liveness]:
        """By the claims alone."""
        return [self._liveness(request, node) for node in range(len(request.nodes))]

    def endpoint(self, request: AttemptRequest, node: int, host: str, port: int) -> str | None:  # noqa: ARG002
        """Nowhere."""
        return None

    def stop(self, request: AttemptRequest, control: Control) -> None:
        """Leave the control where the workers look for it."""
        self._run_directory(request).set_control(control.to_json())

    def kill(self, request: AttemptRequest) -> None:
        """Nobody is reached, now or at another try."""
        _log.warning("%s cannot be ended by force: %s", request.attempt_id, self._why)

    def revoke(self, request: AttemptRequest) -> None:
        """Take every claim that is still free."""
        directory = self._run_directory(request)
        for node in range(len(request.nodes)):
            directory.claim(node, {"nonce": uuid.uuid4().hex, "revoked": True})

    def sweep(self, request: AttemptRequest, node: int) -> None:
        """Nobody is reached; after another boot nobody is left."""
        if self._liveness(request, node) is not Liveness.REBOOTED:
            raise LaunchError(self._why)

    def _liveness(self, request: AttemptRequest, node: int) -> Liveness:
        claimant = self._run_directory(request).claimant(node)
        if claimant is None:
            return Liveness.UNCLAIMED
        if claimant.get("revoked"):
            return Liveness.REVOKED
        return Liveness.REBOOTED if claimant.get("boot_id", boot_id()) != boot_id() else Liveness.UNKNOWN
