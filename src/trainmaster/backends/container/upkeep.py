"""The containers of a server as the engine last told of them, and the removal of those that have done their work.

One thread asks, so that nobody who looks at a job waits for an engine that hangs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from trainmaster.backends.container.engine import Container, Engine, EngineError, RefusedByEngineError
from trainmaster.backends.container.memory import KernelKills
from trainmaster.backends.container.rendering import (
    ATTEMPT,
    KEEP,
    NODE,
    NODES,
    PORT,
    PROBE_PREFIX,
    PROBED_AT,
    RUN_DIR,
    RUNS,
)
from trainmaster.backends.local import liveness_of
from trainmaster.core.sight import Liveness
from trainmaster.protocol.processes import boot_id
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.rundir import RunDirectory, exit_document

_log = logging.getLogger(__name__)
_EVERY_S = 0.5
_STALE_S = 15.0
"""What the engine said longer ago says nothing of now."""
_NETWORKS_EVERY_S = 10.0
_FORGET_S = 3600.0
_PROBE_LEFT_S = 300.0
_LINGERS_S = 2.0


class Upkeep:
    """Watches the containers of a server's run directories, and clears up after them."""

    def __init__(self, engine: Engine, runs: Path, remove: Callable[[str], None]) -> None:
        """Take the engine, where run directories lie, and what removes a container with all that belongs to it."""
        self._engine = engine
        self._label = f"{RUNS}={runs}"
        self._remove = remove
        self._stopping = threading.Event()
        self._seen: Mapping[str, Container] = {}
        self._seen_from = float("-inf")
        """When the engine was asked for what is in `_seen`."""
        self._claimed_from: dict[str, float] = {}
        """When each container was first seen to have been claimed."""
        self._kills: dict[str, KernelKills] = {}
        """What the kernel killed in each container that was seen to run."""
        self._networks_due = float("-inf")
        self._is_away = False
        self._thread = threading.Thread(target=self._run, name="containers", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def liveness(self, name: str, directory: RunDirectory, node: int) -> Liveness:
        """What is known of the worker in a container."""
        claimant = directory.claimant(node)
        if claimant is None:
            return Liveness.UNCLAIMED
        if claimant.get("revoked"):
            return Liveness.REVOKED
        now = time.monotonic()
        claimed_from = self._claimed_from.setdefault(name, now)
        found = self._seen.get(name)
        # What was asked before the claim was there does not tell of whoever made it.
        if self._seen_from < claimed_from or now - self._seen_from > _STALE_S:
            return Liveness.UNKNOWN
        if found is not None and not found.has_ended:
            return Liveness.ALIVE
        return Liveness.GONE if claimant.get("boot_id") == boot_id() else Liveness.REBOOTED

    def port(self, name: str) -> int | None:
        """Where the service of a container is published; None where it has none, or is not seen."""
        found = self._seen.get(name)
        told = found.labels.get(PORT, "") if found is not None else ""
        return int(told) if told else None

    def tell_memory(self, name: str, directory: RunDirectory, node: int) -> None:
        """Write down how a container ended that the kernel has killed for want of memory, its worker with it."""
        if directory.document(exit_document(node)) is not None:
            return
        counted = self._kills.get(name)
        if (counted is not None and counted.count > 0) or self._engine.ran_out_of_memory(name):
            message = "the container was killed by the kernel, with the worker in it: out of memory"
            ended = {"reason": Reason.OUT_OF_MEMORY, "message": message, "ended_at": time.time()}
            directory.put_document(exit_document(node), ended)

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            try:
                self.look()
                self._is_away = False
            except EngineError as error:
                if not self._is_away:
                    _log.warning("%s", error)
                self._is_away = True
            except Exception:
                _log.exception("containers could not be looked after")

    def look(self) -> None:
        """Ask the engine once, and remove what has done its work."""
        asked_at = time.monotonic()
        found = {container.name: container for container in self._engine.containers(self._label)}
        gone = self._seen.keys() - found.keys()  # a worker outside removes its own
        self._seen, self._seen_from = found, asked_at
        running = {name for name, container in found.items() if container.is_running}
        for name in running - self._kills.keys():
            self._kills[name] = KernelKills(self._engine.process(name))
        for name in self._kills.keys() - found.keys():
            del self._kills[name]
        done = [container for container in found.values() if self._is_seen_to(container)]
        if done or gone or asked_at > self._networks_due:
            self._networks_due = asked_at + _NETWORKS_EVERY_S
            self._remove_networks()
        for name, at in list(self._claimed_from.items()):
            if name not in found and asked_at - at > _FORGET_S:
                del self._claimed_from[name]

    def _is_seen_to(self, container: Container) -> bool:
        """Whether a container was removed. What cannot be read, or removed, of one holds up no other."""
        try:
            if container.labels.get(KEEP) == "yes" and _lingers(container):
                self._engine.kill(container.name)
            if not _has_done(container):
                return False
            self._remove(container.name)
        except (OSError, ValueError, TypeError, KeyError, RefusedByEngineError) as error:
            _log.error("container %s cannot be looked after: %r", container.name, error)
            return False
        return True

    def _remove_networks(self) -> None:
        # Then no container will come any more, and those that there are now are all.
        idle = {name: labels for name, labels in self._engine.networks(self._label).items() if _was_taken_up(labels)}
        if idle:
            in_use = {container.labels.get(ATTEMPT) for container in self._engine.containers(self._label)}
            for name, labels in idle.items():
                if labels[ATTEMPT] not in in_use:
                    self._engine.remove_network(name)


def _was_taken_up(labels: Mapping[str, str]) -> bool:
    """Whether every node of a network's attempt was claimed, and no worker outside may still begin its container; or
    the job is gone.
    """
    directory = RunDirectory(Path(labels[RUN_DIR]))
    return not directory.path.exists() or all(
        liveness_of(directory, node) not in (Liveness.UNCLAIMED, Liveness.ALIVE) for node in range(int(labels[NODES]))
    )


def _has_done(container: Container) -> bool:
    """Whether a container is of no use any more."""
    labels = container.labels
    if container.name.startswith(PROBE_PREFIX):
        # Made to look into an image, by a server that would have removed it by now.
        return time.time() - float(labels[PROBED_AT]) > _PROBE_LEFT_S
    directory, node = RunDirectory(Path(labels[RUN_DIR])), int(labels[NODE])
    if not directory.path.exists():
        return True
    if labels[KEEP] == "yes":
        return False
    if directory.document(exit_document(node)) is not None:
        return container.has_ended or _lingers(container)
    claimant = directory.claimant(node)
    return claimant is not None and bool(claimant.get("revoked"))


def _lingers(container: Container) -> bool:
    """Whether a container runs on though its worker, which writes down its end last of all, has done so a while ago."""
    directory, node = RunDirectory(Path(container.labels[RUN_DIR])), int(container.labels[NODE])
    ended = directory.document(exit_document(node))
    return not container.has_ended and ended is not None and time.time() - float(ended["ended_at"]) > _LINGERS_S
