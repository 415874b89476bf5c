"""An engine of a cluster without processes: its jobs are what a test says that they are."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainmaster.backends.cluster.engine import EngineAwayError, EngineJob, EngineLaunch, EnginePhase
from trainmaster.server.core.reports import EngineFacts
from trainmaster.server.core.resources import Node


@dataclass
class ScriptedEngine:
    """Keeps what it is given, in memory. Nothing runs, and nothing changes by itself."""

    kind: str = "scripted"
    node_variable: str = "NODE"
    present: dict[str, EngineJob] = field(default_factory=dict)
    """By name."""
    launches: list[EngineLaunch] = field(default_factory=list)
    new: list[bool] = field(default_factory=list)
    """Of each start, whether the engine was told that nobody tried before."""
    cancelled: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    known_nodes: list[Node] = field(default_factory=list)
    error: Exception | None = None
    """What every question is answered with."""
    lists: bool = True
    """False: jobs are found by their names, and not listed yet."""
    asked: int = 0
    """Lists of jobs that were asked for."""
    changed: threading.Event = field(default_factory=threading.Event)

    def facts(self) -> EngineFacts:
        return EngineFacts(name="Scripted", host="here", problem=str(self.error or ""))

    def document(self, launch: EngineLaunch) -> str:
        variables = "".join(f"\n{name}={text}" for name, text in launch.environment.items())
        return f"run {launch.name} on {launch.node_count} nodes{variables}"

    def start(self, launch: EngineLaunch, *, is_new: bool = False) -> str:
        self.new.append(is_new)
        self._answer()
        present = None if is_new else self.present.get(launch.name)
        if present is not None and present.phase is not EnginePhase.PREPARING:
            return present.handle
        handle = str(len(self.launches) + 1)
        self.launches.append(launch)
        self.present[launch.name] = EngineJob(
            attempt_id=launch.request.attempt_id, handle=handle, phase=EnginePhase.QUEUED, message="Priority"
        )
        return handle

    def find(self, name: str) -> EngineJob | None:
        self._answer()
        return self.present.get(name)

    def jobs(self) -> Mapping[str, EngineJob]:
        self.asked += 1
        self._answer()
        return dict(self.present) if self.lists else {}

    def wait(self, timeout_s: float) -> None:
        self.changed.wait(timeout_s)
        self.changed.clear()

    def cancel(self, handle: str) -> None:
        self._answer()
        self.cancelled.append(handle)

    def forget(self, handle: str) -> None:
        self._answer()
        self.forgotten.append(handle)
        self.present = {name: job for name, job in self.present.items() if job.handle != handle}

    def nodes(self) -> Sequence[Node]:
        self._answer()
        return self.known_nodes

    def close(self) -> None:
        self.changed.set()

    def becomes(self, name: str, **changes: object) -> None:
        self.present[name] = replace(self.present[name], **changes)  # type: ignore[arg-type]
        self.changed.set()

    def away(self, message: str = "it does not answer") -> None:
        self.error = EngineAwayError(message)

    def _answer(self) -> None:
        if self.error is not None:
            raise self.error
