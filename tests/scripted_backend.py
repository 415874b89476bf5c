"""A backend whose workers do what a script says: for tests, demonstrations and simulations.

It starts no process. Its workers claim, write and end in run directories like real ones, one act at a
time, whenever `advance` is called; so everything above a backend can be driven without a clock. The
workers live in a `ScriptedWorld`, which outlives the server that talks to them, as real ones do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainmaster.backends.base import Capabilities, LaunchError, Loss, PlacementBy, endpoint_on_node
from trainmaster.protocol.launch import Lifetime
from trainmaster.protocol.reasons import REASON_OF_STOP, Reason
from trainmaster.protocol.request import AttemptRequest, Control
from trainmaster.protocol.run_directory import (
    RunDirectory,
    endpoint_document,
    events_stream,
    exit_document,
    worker_stream,
)
from trainmaster.protocol.secrets import Secrets
from trainmaster.server.core.reports import EngineFacts, Liveness
from trainmaster.server.core.resources import Node

Act = Mapping[str, Any]
"""A record of the worker, or one of {"rank": record}, {"exit": {...}}, {"vanish": True}, {"endpoint": {...}}."""
Script = Callable[[AttemptRequest, int], Iterable[Act]]
"""What the worker of one node does, in order."""


def succeed(request: AttemptRequest, node: int) -> Iterator[Act]:
    """Start, and end well."""
    yield {"type": "started", "ranks": []}
    yield {"exit": {"reason": Reason.SUCCEEDED, "message": "done"}}


@dataclass(slots=True)
class _Worker:
    request: AttemptRequest
    node: int
    acts: Iterator[Act]
    gone: bool = False
    stop: Control | None = None


@dataclass(slots=True)
class ScriptedWorld:
    """The workers, and a record of what they did."""

    run_directory: Callable[[AttemptRequest], RunDirectory]
    script: Script = succeed
    workers: dict[tuple[str, int], _Worker] = field(default_factory=dict)
    started: list[tuple[str, int]] = field(default_factory=list)
    """(attempt id, node) of every worker that got its claim and so ran user code."""
    swept: list[tuple[str, int]] = field(default_factory=list)
    given: dict[str, Secrets] = field(default_factory=dict)
    """What the workers of each attempt were given."""

    def advance(self, now: float) -> bool:
        """Let every worker do its next act; False when none has anything left to do."""
        busy = False
        for worker in list(self.workers.values()):
            if not worker.gone:
                busy = True
                self._act(worker, now)
        return busy

    def alive(self) -> list[str]:
        """Attempts that have a living worker."""
        return [worker.request.attempt_id for worker in self.workers.values() if not worker.gone]

    def _act(self, worker: _Worker, now: float) -> None:
        if worker.stop is not None:
            cause = worker.stop.stop
            act: Act = {
                "exit": {"reason": REASON_OF_STOP[cause], "message": f"stopped: {cause}", "stop_cause": cause}
                if cause
                else {}
            }
        else:
            act = next(worker.acts, {})
        directory = self.run_directory(worker.request)
        node = worker.node
        if "exit" in act:
            directory.put_document(exit_document(node), {"ended_at": now, **act["exit"]})
            worker.gone = True
        elif "vanish" in act:
            worker.gone = True
        elif "endpoint" in act:
            directory.put_document(endpoint_document(node), act["endpoint"])
        elif "rank" in act:
            rank = node * worker.request.launch.ranks_per_node
            _append(directory, events_stream(node, rank), {"t": now, **act["rank"]})
        elif act:
            _append(directory, worker_stream(node), {"t": now, **act})


CAPABILITIES = Capabilities(placement=PlacementBy.US, lifetimes=frozenset(Lifetime))


class ScriptedBackend:
    """Talks to a `ScriptedWorld`."""

    name = "scripted"
    capabilities = CAPABILITIES

    def __init__(self, world: ScriptedWorld, nodes: Sequence[Node]) -> None:
        self._world = world
        self._nodes = tuple(nodes)
        self.broken: str | None = None
        """Set to a message to make every launch fail."""

    def open(self) -> None:
        """There is nothing to get ready."""

    def inventory(self) -> Sequence[Node]:
        """The nodes that it was given."""
        return self._nodes

    def engine(self) -> EngineFacts | None:
        """There is none."""
        return None

    def loss(self, request: AttemptRequest, node: int) -> Loss | None:
        """There is no engine that knows."""
        return None

    def render(self, request: AttemptRequest) -> str:
        """The request itself."""
        return json.dumps(request.to_json(), indent=2)

    def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:
        """Start a worker for each node that has none; like a real one, it claims or gives up."""
        if self.broken is not None:
            raise LaunchError(self.broken)
        directory = self._world.run_directory(request)
        for node in range(len(request.nodes)):
            if not directory.claim(node, {"nonce": f"{request.attempt_id}/{node}/{len(self._world.started)}"}):
                continue
            self._world.started.append((request.attempt_id, node))
            self._world.given[request.attempt_id] = secrets
            acts = iter(self._world.script(request, node))
            self._world.workers[request.attempt_id, node] = _Worker(request, node, acts)
            _append(directory, worker_stream(node), {"t": 0.0, "type": "claimed"})
        return None

    def observe(self, request: AttemptRequest) -> Sequence[Liveness]:
        """What the world knows."""
        directory = self._world.run_directory(request)
        seen = []
        for node in range(len(request.nodes)):
            claimant = directory.claimant(node)
            worker = self._world.workers.get((request.attempt_id, node))
            if claimant is None:
                seen.append(Liveness.UNCLAIMED)
            elif claimant.get("revoked"):
                seen.append(Liveness.REVOKED)
            else:
                seen.append(Liveness.GONE if worker is None or worker.gone else Liveness.ALIVE)
        return seen

    def endpoint(self, request: AttemptRequest, node: int, host: str, port: int) -> str | None:
        """On the node itself."""
        return endpoint_on_node(request, node, host, port)

    def stop(self, request: AttemptRequest, control: Control) -> None:
        """The worker ends at its next act."""
        for node in range(len(request.nodes)):
            worker = self._world.workers.get((request.attempt_id, node))
            if worker is not None and control.stop is not None:
                worker.stop = control

    def kill(self, request: AttemptRequest) -> None:
        """The workers are gone without a word."""
        for node in range(len(request.nodes)):
            worker = self._world.workers.get((request.attempt_id, node))
            if worker is not None:
                worker.gone = True

    def revoke(self, request: AttemptRequest) -> None:
        """Take every claim that is still free."""
        directory = self._world.run_directory(request)
        for node in range(len(request.nodes)):
            directory.claim(node, {"nonce": f"revoked/{request.attempt_id}/{node}", "revoked": True})

    def sweep(self, request: AttemptRequest, node: int) -> None:
        """There is nothing to kill."""
        self._world.swept.append((request.attempt_id, node))

    def close(self) -> None:
        """The world goes on."""


def _append(directory: RunDirectory, stream: str, record: Mapping[str, Any]) -> None:
    end = dict(directory.streams()).get(stream, 0)
    directory.append(stream, end, json.dumps(record).encode() + b"\n")
