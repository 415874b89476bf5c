"""The engine of a Ray cluster: Ray's Jobs API, and what its state API says of each job's actors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """An attempt that this process started or saw, until it is forgotten."""

    job: EngineJob
    session: str
    """Of the head that had it. A head that starts without a store of its own knows nothing of the last session."""


class RayEngine:
    """Secrets travel in a package that the dashboard accepts and does not show, and that the driver removes when it
    has read it. Ray separates neither users nor jobs: whoever may submit jobs can read the memory of all workers.
    """

    kind = RAY
    node_variable = render.NODE_VARIABLE

    def __init__(self, name: str, instance: str, options: RayOptions) -> None:
        self._name = name
        self._instance = instance
        self._options = options
        self._namespace = render.namespace(instance, options)
        self._ray = RayConnection(options)
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._addresses: dict[str, str] = {}
        """Ray's id of a node -> its address."""
        self._losses: dict[tuple[str, frozenset[int]], Mapping[int, Loss]] = {}
        """Attempt and the nodes that live -> why the others do not."""
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

    def start(self, launch: EngineLaunch) -> str:
        name = launch.name
        if not self._session:
            self._version()
        if self._details(name) is not None:
            return name
        body = render.submission(launch, self._options)
        try:
            self._ray.put(f"/api/packages/gcs/{render.package_name(name)}", render.package(launch, self._options))
            self._ray.post("/api/jobs/", body)
        except RayRefusedError as error:
            if "already exists" not in str(error):
                raise EngineRefusedError(f"Ray refuses the job: {error}") from error
        waits = EngineJob(attempt_id=launch.request.attempt_id, handle=name, phase=EnginePhase.QUEUED)
        with self._lock:
            self._known.setdefault(name, _Known(job=waits, session=self._session))
        self._changed.set()
        return name

    def find(self, name: str) -> EngineJob | None:
        known = self._known_names() & {name}
        details = self._details(name)
        if details is not None and not self._is_ours(details):
            return None
        return self._read([] if details is None else [details], known).get(name)

    def jobs(self) -> Mapping[str, EngineJob]:
        known = self._known_names()  # before the list, which lacks what is started while it is made
        listed = [details for details in self._ray.get("/api/jobs/") if self._is_ours(details)]
        return self._read(listed, known)

    def wait(self, timeout_s: float) -> None:
        """Ray's dashboard does not say when something changes."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def cancel(self, handle: str) -> None:
        try:
            self._ray.post(f"/api/jobs/{quote(handle, safe='')}/stop")
        except RayRefusedError as error:
            if error.status != 404:
                raise EngineAwayError(f"Ray does not stop {handle}: {error}") from error
        self._changed.set()

    def forget(self, handle: str) -> None:
        try:
            self._ray.delete(f"/api/jobs/{quote(handle, safe='')}")
        except RayRefusedError as error:
            if error.status != 404:
                raise EngineAwayError(f"Ray does not delete {handle}: {error}") from error
        with self._lock:
            self._known.pop(handle, None)
            self._losses = {key: losses for key, losses in self._losses.items() if key[0] != handle}

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

    # -- reading --

    def _version(self) -> dict[str, Any]:
        version: dict[str, Any] = self._ray.get("/api/version")
        session = str(version.get("session_name") or "")
        with self._lock:
            if session != self._session:
                # The first that this process sees is not a restart.
                self._session_since = time.monotonic() if self._session else float("-inf")
                self._session = session
        return version

    def _details(self, name: str) -> dict[str, Any] | None:
        try:
            details: dict[str, Any] = self._ray.get(f"/api/jobs/{quote(name, safe='')}")
        except RayRefusedError as error:
            if error.status != 404:
                raise EngineAwayError(f"Ray does not show {name}: {error}") from error
            return None
        return details

    def _known_names(self) -> set[str]:
        with self._lock:
            return set(self._known)

    def _is_ours(self, details: Mapping[str, Any]) -> bool:
        return details.get("type") == "SUBMISSION" and _metadata(details).get(render.INSTANCE) == self._instance

    def _read(self, listed: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, EngineJob]:
        """The jobs that the dashboard listed, and those of these names that it no longer has."""
        self._version()  # after the list: a list of an older session lacks nothing
        running = {details["submission_id"] for details in listed if details["status"] == "RUNNING"}
        actors = self._living() if running else {}
        started = {name for name in running if actors.get(name)}
        groups = self._waiting_groups() if running - started else {}
        found = {}
        for details in listed:
            name = details["submission_id"]
            found[name] = self._job(details, actors.get(name, {}), groups.get(name))
        with self._lock:
            for name, job in found.items():
                self._known[name] = _Known(job=job, session=self._session)
            missing = {name: self._known[name] for name in names if name in self._known and name not in found}
        return found | {name: self._gone(known) for name, known in missing.items()}

    def _job(self, details: Mapping[str, Any], actors: Mapping[int, str], group: Mapping[str, Any] | None) -> EngineJob:
        metadata, name = _metadata(details), str(details["submission_id"])
        job = EngineJob(
            attempt_id=metadata.get(render.ATTEMPT, ""),
            handle=name,
            phase=states.PHASES.get(details["status"], EnginePhase.RUNNING),
            message=str(details.get("message") or ""),
        )
        if job.phase is EnginePhase.ENDED:
            message, loss, losses = states.ended(details)
            return replace(job, message=message, loss=loss, node_losses=losses)
        if job.phase is EnginePhase.QUEUED:
            return job
        wanted = int(metadata.get(render.NODES, "1"))
        before = self._known.get(name)
        if not actors and before is not None and before.job.phase is EnginePhase.RUNNING:
            return before.job  # its workers have ended, and its driver has not yet
        if not actors:
            message = states.waiting(group) if group is not None else "its driver prepares it on the Ray cluster"
            return replace(job, phase=EnginePhase.QUEUED, message=message)
        losses = self._dead(name, details, frozenset(actors)) if len(actors) < wanted else {}
        if len(actors) + len(losses) < wanted:
            message = f"{len(actors)} of {wanted} workers have started"
            return replace(job, phase=EnginePhase.QUEUED, message=message)
        return replace(job, message="", addresses=self._addresses_of(actors), node_losses=losses)

    def _living(self) -> dict[str, dict[int, str]]:
        """Attempt -> node -> Ray's id of the node where its actor lives."""
        found: dict[str, dict[int, str]] = {}
        for actor in self._ray.states("actors", state="ALIVE", ray_namespace=self._namespace):
            name, _, number = str(actor["name"]).rpartition("/")
            if number.isdigit():
                found.setdefault(name, {})[int(number)] = str(actor["node_id"])
        return found

    def _waiting_groups(self) -> dict[str, dict[str, Any]]:
        listed = self._ray.states("placement_groups", detail=True, state="PENDING")
        return {str(group["name"]): group for group in listed}

    def _dead(self, name: str, details: Mapping[str, Any], living: frozenset[int]) -> Mapping[int, Loss]:
        """Why nodes of a job do not live; those that have not lived yet are not there."""
        if (known := self._losses.get((name, living))) is not None:
            return known
        dead: dict[int, dict[str, Any]] = {}
        # By its job: dead actors of all times are listed together, up to a limit.
        for actor in self._ray.states("actors", detail=True, job_id=str(details.get("job_id") or "")):
            node = str(actor["name"]).rpartition("/")[2]
            if actor["state"] == "DEAD" and node.isdigit() and int(node) not in living:
                dead[int(node)] = actor
        losses = {number: states.death(actor.get("death_cause") or {}) for number, actor in dead.items()}
        is_final = len(living) + len(losses) == int(_metadata(details).get(render.NODES, "1"))
        if any(loss.reason is Reason.WORKER_LOST for loss in losses.values()):
            # The processes of a node may end before it: what is known of them is not known of the node yet.
            is_final = False
            gone = {each["node_id"] for each in self._ray.states("nodes") if each["state"] == "DEAD"}
            for number, actor in dead.items():
                if losses[number].reason is Reason.WORKER_LOST and actor.get("node_id") in gone:
                    losses[number] = states.death({"actor_died_error_context": {"reason": "NODE_DIED"}})
        if is_final:
            with self._lock:
                self._losses[name, living] = losses
        return losses

    def _addresses_of(self, actors: Mapping[int, str]) -> dict[int, str]:
        if any(node not in self._addresses for node in actors.values()):
            listed = self._ray.states("nodes")
            with self._lock:
                self._addresses = {str(node["node_id"]): str(node["node_ip"]) for node in listed}
        return {number: self._addresses[node] for number, node in sorted(actors.items()) if node in self._addresses}

    def _gone(self, known: _Known) -> EngineJob:
        """An attempt that Ray knew, and does not list any more."""
        job = known.job
        if job.phase is EnginePhase.ENDED:
            return job
        if known.session and known.session == self._session:
            message = "somebody removed it from the Ray cluster"
            reason = Reason.ENGINE_CANCELLED
        elif not self._session:
            message, reason = "the Ray cluster does not know it any more", Reason.ENGINE_CANCELLED
        else:
            message = "the head of the Ray cluster restarted and lost its jobs, as it has no external store"
            reason = Reason.NODE_LOST
            if job.phase is EnginePhase.RUNNING and time.monotonic() < self._session_since + WORKERS_END_S:
                return replace(job, message=f"{message}; its worker ends within {WORKERS_END_S:.0f} s")
        ended = replace(job, phase=EnginePhase.ENDED, message=message, loss=Loss(reason=reason, message=message))
        with self._lock:
            if job.handle in self._known:
                self._known[job.handle] = replace(known, job=ended)
        return ended


def _metadata(details: Mapping[str, Any]) -> Mapping[str, str]:
    return details.get("metadata") or {}
