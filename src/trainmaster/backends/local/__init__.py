"""The local backend: workers are forked on this machine from a warm parent.

Files are shared by default; over HTTP, a courier beside each worker carries them to the server, as it would from
another machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from trainmaster.backends import BACKENDS, BackendContext
from trainmaster.backends.base import LaunchError, Loss, claim_free_nodes, endpoint_on_node
from trainmaster.backends.local.fork_client import ForkServer, ForkServerError
from trainmaster.backends.local.inventory import LocalInventory
from trainmaster.protocol.launch import LOCAL
from trainmaster.protocol.processes import AT_REST, KEPT, ProcessIdentity, boot_id, is_alive, send_signal
from trainmaster.protocol.request import AttemptRequest, Control
from trainmaster.protocol.run_directory import SEARCH_ONLY, RunDirectory, exit_document
from trainmaster.protocol.secrets import Secrets
from trainmaster.server.core.reports import EngineFacts, Liveness
from trainmaster.server.core.resources import Node

__all__ = ["LocalBackend", "kill_worker", "liveness_of", "make"]

_log = logging.getLogger(__name__)
_DELIVERY_TIMEOUT_S = 30.0
_WARM_EVERY_S = 60.0


def make(context: BackendContext) -> LocalBackend:
    return LocalBackend(
        fork_server=ForkServer(context.data_dir / "forkserver"),
        inventory=LocalInventory(
            storage=context.data_dir, simulated_gpus=context.simulated_gpus, slots=context.slots_per_node
        ),
        run_directory=context.run_directory,
        spool=context.data_dir / "spool",
    )


class LocalBackend:
    name = LOCAL
    capabilities = BACKENDS[LOCAL].capabilities

    def __init__(
        self,
        *,
        fork_server: ForkServer,
        inventory: LocalInventory,
        run_directory: Callable[[AttemptRequest], RunDirectory],
        spool: Path,
    ) -> None:
        self._fork_server = fork_server
        self._inventory = inventory
        self._run_directory = run_directory
        self._spool = spool
        self._closed = threading.Event()

    def inventory(self) -> Sequence[Node]:
        return self._inventory.nodes()

    def engine(self) -> EngineFacts | None:
        return None

    def render(self, request: AttemptRequest) -> str:
        """The requests to the fork server."""
        return json.dumps([self._order(request, node) for node in range(len(request.nodes))], indent=2)

    def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:
        """The workers inherit the secrets; over HTTP the couriers fetch them."""
        given = {"secrets": secrets.to_json()} if secrets and request.server_url is None else {}
        directory = self._run_directory(request)
        if request.uid is not None:
            self._let_through(request)
        for node in range(len(request.nodes)):
            if directory.claimant(node) is not None:
                continue
            try:
                self._fork_server.ask({**self._order(request, node), **given})
            except ForkServerError as error:
                # Nothing more of it may start; nodes that already run are stopped as a broken gang.
                self.revoke(request)
                if all(alive is Liveness.REVOKED for alive in self.observe(request)):
                    raise LaunchError(f"the local fork server did not start a worker: {error}") from error
        return None

    def _let_through(self, request: AttemptRequest) -> None:
        """Let the job's user pass to where its worker makes directories for it."""
        runs = self._run_directory(request).path.parents[1] if request.server_url is None else self._spool
        artifacts = {Path(directory).parents[1] for directory in (request.checkpoint_dir, request.output_dir)}
        caches = {Path(request.cache_dir).parent} if request.cache_dir else set()
        try:
            grant_traversal(self._spool.parent, [runs, *artifacts, *caches])
        except OSError as error:
            raise LaunchError(f"uid {request.uid} cannot be let through to its files: {error}") from error

    def observe(self, request: AttemptRequest) -> Sequence[Liveness]:
        directory = self._run_directory(request)
        return [liveness_of(directory, node) for node in range(len(request.nodes))]

    def loss(self, request: AttemptRequest, node: int) -> Loss | None:  # noqa: ARG002 - there is no engine that knows
        return None

    def endpoint(self, request: AttemptRequest, node: int, host: str, port: int) -> str | None:
        return endpoint_on_node(request, node, host, port)

    def stop(self, request: AttemptRequest, control: Control) -> None:
        self._run_directory(request).set_control(control.to_json())

    def kill(self, request: AttemptRequest) -> None:
        """The ranks die with their workers."""
        directory = self._run_directory(request)
        for node in range(len(request.nodes)):
            kill_worker(directory, node)

    def revoke(self, request: AttemptRequest) -> None:
        claim_free_nodes(self._run_directory(request), request)

    def sweep(self, request: AttemptRequest, node: int) -> None:
        """Over HTTP, what the node wrote is also delivered."""
        self._fork_server.ask({"op": "sweep", "attempt_id": request.attempt_id, "node": node})
        if request.server_url is not None:
            self._deliver(request, node)

    def _deliver(self, request: AttemptRequest, node: int) -> None:
        """Start a courier that delivers what a dead one left."""
        directory = self._run_directory(request)
        self._fork_server.ask({**self._order(request, node), "delivers_only": True})
        deadline = time.monotonic() + _DELIVERY_TIMEOUT_S
        while directory.document(exit_document(node)) is None:
            if self._closed.wait(0.05):
                raise LaunchError("the server stops; what is left is delivered after its next start")
            if time.monotonic() > deadline:
                _log.error("what node %d of %s left behind was not delivered", node, request.attempt_id)
                return

    def open(self) -> None:
        """Start the fork server before the first job needs it, and keep it from ending as unused."""
        threading.Thread(target=self._keep_warm, name="warm", daemon=True).start()

    def _keep_warm(self) -> None:
        while True:
            try:
                self._fork_server.ensure()
            except ForkServerError as error:
                _log.error("the local fork server does not start: %s", error)
            if self._closed.wait(_WARM_EVERY_S):
                return

    def close(self) -> None:
        """The fork server and its workers live on."""
        self._closed.set()

    def _order(self, request: AttemptRequest, node: int) -> dict[str, str | int]:
        if request.server_url is None:
            return {"op": "start", "run_dir": str(self._run_directory(request).path), "node": node}
        return {
            "op": "start-courier",
            "server_url": request.server_url,
            "token": request.token,
            "attempt_id": request.attempt_id,
            "node": node,
            "directory": str(self._spool / f"{request.attempt_id}.{node}"),
        }


def liveness_of(directory: RunDirectory, node: int) -> Liveness:
    claimant = directory.claimant(node)
    if claimant is None:
        return Liveness.UNCLAIMED
    if claimant.get("revoked"):
        return Liveness.REVOKED
    try:
        identity = ProcessIdentity.from_json(claimant)
    except ValueError:
        return Liveness.GONE  # nobody whom we could find: a power cut left nothing of it, or a job wrote it
    if identity.boot_id != boot_id():
        return Liveness.REBOOTED
    return Liveness.ALIVE if is_alive(identity) else Liveness.GONE


def kill_worker(directory: RunDirectory, node: int) -> None:
    """Kill a worker that is a process of this machine, if it still runs."""
    claimant = directory.claimant(node)
    if claimant and liveness_of(directory, node) is Liveness.ALIVE:
        with contextlib.suppress(ProcessLookupError):
            send_signal(ProcessIdentity.from_json(claimant), signal.SIGKILL)


# Jobs that run as users of their own have to pass through directories of the server. These users can neither list nor
# change such a directory. All its entries are closed before it is opened; whoever creates an entry that users need
# opens that entry.

_OURS = (
    *(AT_REST, "api-key", "artifacts", "blobs", "cache", "config.toml", "forkserver", "hints.sock"),
    *(KEPT, "lock", "port", "runs", "runtimes", "secret-key", "server.json", "server.log", "shapes", "spool"),
    *(f"{name}.used" for name in BACKENDS),
    *("starting.lock", "trainmaster.db", "trainmaster.db-shm", "trainmaster.db-wal", "trainmaster.db.lock", "workers"),
)
"""The server's entries of a data directory."""
_OTHERS = 0o077


def grant_traversal(data_dir: Path, targets: Iterable[Path]) -> None:
    """Let other users pass through these directories, and through the data directory if it contains any of them."""
    wanted = list(targets)
    if any(data_dir in target.parents for target in wanted):
        # One that others could already list may hold more than ours: its owner has to close that.
        was_open = bool(stat.S_IMODE(data_dir.stat().st_mode) & _OTHERS)
        _open(data_dir, [data_dir / name for name in _OURS] if was_open else list(data_dir.iterdir()))
    for target in wanted:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        _open(target, target.iterdir())


def _open(directory: Path, inside: Iterable[Path]) -> None:
    if stat.S_IMODE(directory.stat().st_mode) == SEARCH_ONLY:
        return
    for path in inside:
        # An entry may disappear meanwhile. A link is as closed as its target.
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            mode = stat.S_IMODE(status.st_mode)
            if mode & _OTHERS and mode != SEARCH_ONLY and not stat.S_ISLNK(status.st_mode):
                path.chmod(mode & ~_OTHERS)
    directory.chmod(SEARCH_ONLY)
