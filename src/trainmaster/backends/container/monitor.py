"""The containers of a server: their state as the engine last reported it, and the removal of finished ones.

One thread asks the engine, so that nobody who observes a job waits for an engine that hangs.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from trainmaster.backends import BackendContext
from trainmaster.backends.container import container_spec as spec
from trainmaster.backends.container.container_process import KernelKills, ran_out_of_memory
from trainmaster.backends.container.engine import (
    Container,
    ContainerEngine,
    ContainerEngineError,
    EngineAwayError,
    RefusedByEngineError,
    engine_of,
)
from trainmaster.backends.container.plans import Plans
from trainmaster.backends.local import liveness_of
from trainmaster.protocol.processes import boot_id
from trainmaster.protocol.reasons import Reason, exit_record
from trainmaster.protocol.run_directory import RunDirectory, exit_document
from trainmaster.server.core.reports import Liveness

_log = logging.getLogger(__name__)
_EVERY_S = 0.5
_STALE_S = 15.0
"""Older reports of the engine say nothing about the present."""
_NETWORKS_EVERY_S = 10.0
_FORGET_S = 3600.0
_PROBE_LEFT_S = 300.0
_LINGERS_S = 2.0
_STOP_S = 1.0
_EXIT_KILLED = 128 + signal.SIGKILL


class ContainerMonitor:
    def __init__(self, engine: ContainerEngine, runs: Path, remove: Callable[[str], None]) -> None:
        """`remove` removes a container with everything that belongs to it."""
        self._engine = engine
        self._label = f"{spec.RUNS}={runs}"
        self._remove = remove
        self._stopping = threading.Event()
        self._seen: Mapping[str, Container] = {}
        self._seen_from = float("-inf")
        """When the engine was asked for `_seen`."""
        self._claimed_from: dict[str, float] = {}
        """When the claim of each container's node was first seen."""
        self._ended_from: dict[str, float] = {}
        """When the exit of each container's node was first seen. By our clock, and once for all: a job can write
        such a document, too, with any time in it, and remove it."""
        self._kills: dict[str, KernelKills] = {}
        """By container that was seen to run."""
        self._networks_due = float("-inf")
        self._is_away = False
        self._thread = threading.Thread(target=self._run, name="containers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)  # the engine may hang

    def liveness(self, name: str, directory: RunDirectory, node: int) -> Liveness:
        claimant = directory.claimant(node)
        if claimant is None:
            return Liveness.UNCLAIMED
        if claimant.get("revoked"):
            return Liveness.REVOKED
        now = time.monotonic()
        claimed_from = self._claimed_from.setdefault(name, now)
        found = self._seen.get(name)
        # A report from before the claim says nothing about the claimant.
        if self._seen_from < claimed_from or now - self._seen_from > _STALE_S:
            return Liveness.UNKNOWN
        if found is not None and not found.has_ended:
            return Liveness.ALIVE
        return Liveness.GONE if claimant.get("boot_id") == boot_id() else Liveness.REBOOTED

    def port(self, name: str) -> int | None:
        """Where the service of a container is published; None if it has none, or is not seen."""
        found = self._seen.get(name)
        told = found.labels.get(spec.PORT, "") if found is not None else ""
        return int(told) if told else None

    def tell_memory(self, name: str, directory: RunDirectory, node: int) -> None:
        """Write the exit of a container that the kernel killed for lack of memory, with its worker."""
        if directory.document(exit_document(node)) is not None or self._engine.exit_code(name) != _EXIT_KILLED:
            return
        counted = self._kills.get(name)
        killed = ran_out_of_memory(self._engine, name, counted) if counted else self._engine.ran_out_of_memory(name)
        if killed:
            message = "the container was killed by the kernel, with the worker in it: out of memory"
            try:
                directory.put_document(exit_document(node), exit_record(Reason.OUT_OF_MEMORY, message))
            except OSError as error:  # the job may have taken its directory from us
                _log.warning("how container %s ended cannot be written down: %s", name, error)

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            try:
                self.poll()
                self._is_away = False
            except ContainerEngineError as error:
                if not self._is_away:
                    _log.warning("%s", error)
                self._is_away = True
            except Exception:
                _log.exception("the check of the containers failed")

    def poll(self) -> None:
        asked_at = time.monotonic()
        found = {container.name: container for container in self._engine.containers(self._label)}
        gone = self._seen.keys() - found.keys()  # a worker outside removes its own
        self._seen, self._seen_from = found, asked_at
        running = {name for name, container in found.items() if container.state == "running"}
        for name in running - self._kills.keys():
            self._kills[name] = KernelKills(self._engine.process(name))
        for known in (self._kills, self._ended_from):
            for name in known.keys() - found.keys():
                del known[name]
        done = [container for container in found.values() if self._is_seen_to(container)]
        if done or gone or asked_at > self._networks_due:
            self._networks_due = asked_at + _NETWORKS_EVERY_S
            self._remove_networks()
        for name, at in list(self._claimed_from.items()):
            if name not in found and asked_at - at > _FORGET_S:
                del self._claimed_from[name]

    def _is_seen_to(self, container: Container) -> bool:
        """Remove a container if it is finished; returns whether it was. An error does not affect other containers."""
        try:
            if _has_end(container):
                self._ended_from.setdefault(container.name, time.monotonic())
            if container.labels.get(spec.KEEP) == "yes" and self._lingers(container):
                self._engine.kill(container.name)
            if not self._has_done(container):
                return False
            self._remove(container.name)
        except (OSError, ValueError, TypeError, KeyError, RefusedByEngineError) as error:
            _log.error("container %s cannot be checked or removed: %r", container.name, error)
            return False
        return True

    def _has_done(self, container: Container) -> bool:
        labels = container.labels
        if container.name.startswith(spec.PROBE_PREFIX):
            # A probe of an image; the server that made it would have removed it by now.
            return time.time() - float(labels[spec.PROBED_AT]) > _PROBE_LEFT_S
        directory, node = RunDirectory(Path(labels[spec.RUN_DIR])), int(labels[spec.NODE])
        if not directory.path.exists():
            return True
        if labels[spec.KEEP] == "yes":
            return False
        if container.name in self._ended_from:
            return container.has_ended or self._lingers(container)
        claimant = directory.claimant(node)
        return claimant is not None and bool(claimant.get("revoked"))

    def _lingers(self, container: Container) -> bool:
        """Whether a container still runs some time after its worker, which writes the exit last of all, has done so."""
        ended_from = self._ended_from.get(container.name)
        return ended_from is not None and not container.has_ended and time.monotonic() - ended_from > _LINGERS_S

    def _remove_networks(self) -> None:
        """Remove networks without containers. An error with one does not affect others."""
        # Idle: no container will join any more, and those that exist now are all.
        idle = {name: labels for name, labels in self._engine.networks(self._label).items() if _is_idle(name, labels)}
        present = self._engine.containers(self._label) if idle else ()
        for name, labels in idle.items():
            in_it = [container for container in present if container.labels.get(spec.ATTEMPT) == labels[spec.ATTEMPT]]
            if not all(container.has_ended for container in in_it):
                continue
            try:
                for container in in_it:
                    self._engine.disconnect(name, container.name)  # kept, and podman counts those too
                self._engine.remove_network(name)
            except EngineAwayError:
                raise
            except ContainerEngineError as error:
                _log.error("network %s cannot be removed: %s", name, error)


def _is_idle(name: str, labels: Mapping[str, str]) -> bool:
    try:
        return spec.ATTEMPT in labels and _was_taken_up(labels)
    except (OSError, ValueError, TypeError, KeyError) as error:
        _log.error("network %s cannot be checked or removed: %r", name, error)
        return False


def _was_taken_up(labels: Mapping[str, str]) -> bool:
    """Whether no container will join the network of these labels any more.

    Its job is gone, or every node of its attempt has ended, or was claimed and has no worker outside that may still
    start its container.
    """
    directory = RunDirectory(Path(labels[spec.RUN_DIR]))
    return not directory.path.exists() or all(
        directory.is_closed
        or directory.status(exit_document(node)) is not None
        or liveness_of(directory, node) not in (Liveness.UNCLAIMED, Liveness.ALIVE)
        for node in range(int(labels[spec.NODES]))
    )


def _has_end(container: Container) -> bool:
    """Whether the exit of a container's node, or the end of its attempt, is recorded; its content does not matter."""
    if spec.NODE not in container.labels:
        return False
    directory, node = RunDirectory(Path(container.labels[spec.RUN_DIR])), int(container.labels[spec.NODE])
    return directory.is_closed or directory.status(exit_document(node)) is not None


_LAST_LOOK_S = 3.0
"""A server that stops waits for this long."""


def leaves_anything(context: BackendContext) -> bool:
    """Whether a server leaves containers, networks or plans to the next one; True if the engine does not answer."""
    plans = Plans(context.data_dir.absolute() / "workers" / "plans")
    plans.clear()
    if plans.are_any:
        return True
    engine, label = engine_of(context, timeout_s=_LAST_LOOK_S), f"{spec.RUNS}={context.runs}"
    try:
        return bool(engine.containers(label) or engine.networks(label))
    except ContainerEngineError:
        return True
    finally:
        engine.close()
