"""The engine of a Ray cluster: requests to the driver, and what the driver says of each attempt."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainmaster.backends.base import Loss
from trainmaster.backends.cluster.engine import (
    EngineAwayError,
    EngineJob,
    EngineLaunch,
    EnginePhase,
    EngineRefusedError,
)
from trainmaster.backends.ray import render, states
from trainmaster.backends.ray.connection import RayConnection, RayRefusedError
from trainmaster.backends.ray.inventory import nodes_from
from trainmaster.backends.ray.options import RayOptions
from trainmaster.protocol.launch import RAY
from trainmaster.protocol.reasons import Reason
from trainmaster.server.core.reports import EngineFacts
from trainmaster.server.core.resources import Node

WORKERS_END_S = 75.0
"""How long nodes look for a head that is gone before Ray ends them (60 s), and then the workers on them."""
ACCEPTED_WITHIN_S = 120.0
"""A launch that the driver has not accepted by then is lost, and sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """An attempt that this process started or saw, until it is forgotten."""

    job: EngineJob
    session: str
    """Of the head that had it. A head that starts without a store of its own knows nothing of the last session."""
    is_documented: bool = False
    """Whether the driver says so. It forgets an end only when it is told to."""
    sent_at: float | None = None
    """By the monotonic clock; None once the driver has accepted it."""


class RayEngine:
    """Secrets travel in packages that the dashboard accepts and does not show, and that the driver removes when it has
    started an attempt. Ray separates neither users nor jobs: whoever may submit jobs can read these packages, and the
    memory of all workers.
    """

    kind = RAY
    node_variable = render.NODE_VARIABLE

    def __init__(self, name: str, instance: str, options: RayOptions) -> None:
        self._name = name
        self._instance = instance
        self._options = options
        self._ray = RayConnection(options)
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._head = ("", "")
        """A session, and the id of its head node."""
        self._documented = "none yet"
        """The session whose driver has written its document."""
        self._session = ""
        self._session_since = float("-inf")
        self._changed = threading.Event()

    def facts(self) -> EngineFacts:
        try:
            version = self._version()
        except (EngineAwayError, RayRefusedError) as error:
            return EngineFacts(problem=f"{error}; is the Ray cluster up, and the option address right?")
        return EngineFacts(name=f"Ray {version.get('ray_version', '')}".strip(), host=self._ray.address)

    def document(self, launch: EngineLaunch) -> str:
        return render.document(launch, self._options)

    def start(self, launch: EngineLaunch, *, is_new: bool = False) -> str:
        name = launch.name
        if not is_new and self.find(name) is not None:
            return name
        self._send(name, "", render.package(launch, self._options))
        waits = EngineJob(
            attempt_id=launch.request.attempt_id,
            handle=name,
            phase=EnginePhase.QUEUED,
            message="its driver on the Ray cluster has not accepted it yet",
        )
        with self._lock:
            self._known[name] = _Known(job=waits, session=self._session, sent_at=time.monotonic())
        self._ensure_driver(anew=True)
        self._changed.set()
        return name

    def find(self, name: str) -> EngineJob | None:
        return self.jobs().get(name)

    def jobs(self) -> Mapping[str, EngineJob]:
        with self._lock:
            before = dict(self._known)  # what is started while the driver's document is read is not missing there
        self._version()
        session = self._session
        details = next(iter(self._drivers()), None)
        shown = self._read_document(details)
        self._version()
        if session != self._session:
            raise EngineAwayError(f"the head of {self._ray.address} has just restarted")
        found = {name: self._job(name, known) for name, known in shown.items()}
        with self._lock:
            for name, job in found.items():
                self._known[name] = _Known(job=job, session=self._session, is_documented=True)
        wanted = any(job.phase is not EnginePhase.ENDED for job in found.values())
        for name, known in before.items():
            if name in found:
                continue
            missed = self._missing(known, details)
            if missed is None:
                with self._lock:
                    self._known.pop(name, None)
                continue
            found[name] = missed
            wanted |= known.sent_at is not None and missed.phase is not EnginePhase.ENDED
        if wanted and (details is None or details["status"] in states.OVER):
            self._ensure_driver()
        return found

    def wait(self, timeout_s: float) -> None:
        """Ray's dashboard does not say when something changes."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def cancel(self, handle: str) -> None:
        self._send(handle, "stop")
        self._ensure_driver()
        self._changed.set()

    def forget(self, handle: str) -> None:
        with self._lock:
            known = self._known.get(handle)
        if known is None:
            return
        if known.session == self._session:
            self._send(handle, "forget")
            self._ensure_driver()
        with self._lock:
            self._known.pop(handle, None)

    def nodes(self) -> Sequence[Node]:
        listed = self._ray.states("nodes", detail=True)
        summary, usage = self._ray.get("/nodes", view="summary"), self._ray.get("/api/cluster_status")
        status = (usage.get("data") or {}).get("clusterStatus") or {}
        return nodes_from(
            self._name,
            listed,
            (summary.get("data") or {}).get("summary") or (),
            (status.get("loadMetricsReport") or {}).get("usageByNode") or {},
        )

    def close(self) -> None:
        self._changed.set()
        self._ray.close()

    # -- the driver --

    def _send(self, name: str, request: str, content: bytes = b"-") -> None:
        try:
            self._ray.put(f"/api/packages/gcs/{render.package_name(name, request)}", content)
        except RayRefusedError as error:
            raise EngineAwayError(f"Ray does not take what is to be done with {name}: {error}") from error

    def _drivers(self) -> list[dict[str, Any]]:
        """The Ray jobs of this instance, the last one first; only that one may be at work."""
        listed: list[dict[str, Any]] = self._ray.get("/api/jobs/")
        own = [each for each in listed if (each.get("metadata") or {}).get(render.INSTANCE) == self._instance]
        return sorted(own, key=lambda each: each.get("start_time") or 0, reverse=True)

    def _ensure_driver(self, *, anew: bool = False) -> None:
        """See that a driver runs. `anew`: one of this version, and again if the last one could not begin."""
        version = render.driver_version(self._instance, self._options)
        with self._starting:
            last, *others = [*self._drivers(), None]
            if last is not None and last["status"] not in states.OVER:
                if not anew or last["metadata"].get(render.VERSION) == version:
                    return
            elif last is not None and states.never_begins(last) and not anew:
                return
            # It takes over from the last one, which ends by itself.
            name = f"trainmaster-{self._instance}-{secrets.token_hex(3)}"
            try:
                self._send(name, "", render.driver_package(self._instance, self._options))
                self._ray.post("/api/jobs/", render.driver_submission(name, self._instance, self._options))
            except RayRefusedError as error:
                raise EngineRefusedError(f"Ray refuses the job that starts all others: {error}") from error
            for each in others:
                if each is not None and each["status"] in states.OVER:
                    with contextlib.suppress(RayRefusedError):
                        self._ray.delete(f"/api/jobs/{each['submission_id']}")

    def _read_document(self, details: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Attempt -> what the driver, or the last one, knows of it."""
        node = str((details or {}).get("driver_node_id") or "") or self._head_node()
        text = self._ray.log_file(node, render.driver_document(self._instance))
        if text is None:
            if self._documented == self._session:
                raise EngineAwayError(f"{self._ray.address} does not show what its jobs do any more")
            return {}
        try:
            attempts: dict[str, Any] = json.loads(text)["attempts"]
        except (ValueError, KeyError) as error:
            raise EngineAwayError(f"{self._ray.address} shows a document that is damaged: {error}") from error
        self._documented = self._session
        return attempts

    def _head_node(self) -> str:
        session, node = self._head
        if session != self._session or not node:
            heads = [str(each["node_id"]) for each in self._ray.states("nodes", state="ALIVE") if each["is_head_node"]]
            if not heads:
                raise EngineAwayError(f"{self._ray.address} shows no head node")
            self._head = (self._session, node := heads[0])
        return node

    def _version(self) -> dict[str, Any]:
        version: dict[str, Any] = self._ray.get("/api/version")
        session = str(version.get("session_name") or "")
        with self._lock:
            if session != self._session:
                # The first that this process sees is not a restart.
                self._session_since = time.monotonic() if self._session else float("-inf")
                self._session = session
        return version

    # -- attempts --

    def _job(self, name: str, known: Mapping[str, Any]) -> EngineJob:
        job = EngineJob(
            attempt_id=str(known["attempt"]),
            handle=name,
            phase=states.PHASES.get(str(known["phase"]), EnginePhase.RUNNING),
        )
        if job.phase is EnginePhase.ENDED:
            loss, losses = states.ended(known)
            return replace(job, message=loss.message, loss=loss, node_losses=losses)
        if job.phase is EnginePhase.QUEUED:
            return replace(job, message=states.waiting(known))
        addresses = {int(number): str(address) for number, address in known["addresses"].items()}
        return replace(job, addresses=addresses, node_losses=states.losses(known))

    def _missing(self, known: _Known, details: Mapping[str, Any] | None) -> EngineJob | None:
        """An attempt that the driver does not know; None: it was forgotten, or never started."""
        job = known.job
        is_same = known.session == self._session or not self._session
        if job.phase is EnginePhase.ENDED:
            return None if is_same and known.is_documented else job
        if known.sent_at is not None and is_same:
            if details is not None and (why := states.never_begins(details)):
                return self._end(known, Reason.LAUNCH_REFUSED, why)
            return job if time.monotonic() < known.sent_at + ACCEPTED_WITHIN_S else None
        if is_same:
            return self._end(known, Reason.ENGINE_CANCELLED, "the Ray cluster does not know it any more")
        message = "the head of the Ray cluster restarted and lost its jobs, as it has no external store"
        if job.phase is EnginePhase.RUNNING and time.monotonic() < self._session_since + WORKERS_END_S:
            return replace(job, message=f"{message}; its worker ends within {WORKERS_END_S:.0f} s")
        return self._end(known, Reason.NODE_LOST, message)

    def _end(self, known: _Known, reason: Reason, message: str) -> EngineJob:
        loss = Loss(reason=reason, message=message)
        ended = replace(known.job, phase=EnginePhase.ENDED, message=message, loss=loss)
        with self._lock:
            if ended.handle in self._known:
                self._known[ended.handle] = replace(known, job=ended, is_documented=False)
        return ended
