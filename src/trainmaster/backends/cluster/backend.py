"""The verbs of a backend on a cluster. One thread follows all attempts of the server on the engine, in one request a
time, so that nobody who observes a job waits for an engine that hangs."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from trainmaster.backends.base import Capabilities, LaunchError, Loss, NotYetError, claim_free_nodes
from trainmaster.backends.cluster import worker_start
from trainmaster.backends.cluster.context import ClusterContext
from trainmaster.backends.cluster.engine import (
    ClusterEngine,
    ClusterOptions,
    EngineAwayError,
    EngineJob,
    EngineLaunch,
    EnginePhase,
    EngineRefusedError,
    ShowsForeignJobs,
    engine_name,
)
from trainmaster.backends.cluster.unheard import Unheard
from trainmaster.backends.worker_package import package_digest, packed_worker
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest, Control
from trainmaster.protocol.run_directory import RunDirectory
from trainmaster.protocol.secrets import Secrets
from trainmaster.server.core.foreign_jobs import ForeignJobs
from trainmaster.server.core.reports import EngineFacts, Liveness
from trainmaster.server.core.resources import Node

_log = logging.getLogger(__name__)

STALE_S = 30.0
"""An older list of jobs says nothing about the present."""
NODES_EVERY_S = 15.0
IDLE_EVERY_S = 10.0
"""How often the engine is asked while the server has no attempt there."""
QUEUED_AGAIN_S = 600.0
"""How often an attempt that waits in the engine's queue is looked at, unless the engine reports a change."""
AWAY_AGAIN_S = 30.0
"""The same of an attempt that the engine may not have."""
UNKNOWN_AFTER_S = 60.0
"""A leader asks for every attempt that is not over at least so often."""
_STOP_S = 2.0


@dataclass(frozen=True, slots=True)
class _Followed:
    """What is kept of an attempt, of thousands: its request is on disk."""

    attempt_id: str
    node_count: int
    observed_at: float
    """When it was last submitted or observed, by the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """The engine's jobs as they were listed."""

    jobs: Mapping[str, EngineJob]
    asked_at: float = float("-inf")
    """When the engine was asked, by the monotonic clock."""


class ClusterBackend:
    def __init__(
        self, engine: ClusterEngine, options: ClusterOptions, capabilities: Capabilities, context: ClusterContext
    ) -> None:
        self.name = context.name
        self.capabilities = capabilities
        self._engine = engine
        self._options = options
        self._context = context
        self._run_directory = context.run_directory
        self._seen = _Seen(jobs={})
        self._nodes: Sequence[Node] = ()
        self._nodes_at = float("-inf")
        self._attempts: dict[str, _Followed] = {}
        """Attempts that were submitted or observed here, by their names on the engine."""
        self._claimed_from: dict[tuple[str, int], float] = {}
        """When the claim of each node was first seen."""
        self._started: set[str] = set()
        """Names of attempts that this process handed to the engine, and that no list shows yet."""
        self._tried: set[str] = set()
        """Names of attempts that this process has handed to the engine, or tried to."""
        self._listed: set[str] = set()
        """Those of the attempts that a list has shown."""
        self._found: dict[str, EngineJob | None] = {}
        """What the engine said of claimed attempts that no list shows: they may have ended while no server ran."""
        self._unheard = Unheard()
        self._waits: dict[str, Future[None]] = {}
        self._to_cancel: set[str] = set()
        """Names of attempts that were withdrawn while the engine was away."""
        self._not_withdrawn: set[str] = set()
        """Names whose claims were looked at since this server leads: what an earlier leader withdrew is known."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._is_away = False
        self._leads_from: float | None = None
        """Since when this server leads."""
        self._thread = threading.Thread(target=self._follow, name=f"follow {self.name}", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)  # the engine may hang
        self._engine.close()

    def inventory(self) -> Sequence[Node]:
        """As last reported: a request to the engine would delay every job."""
        return self._nodes

    def engine(self) -> EngineFacts | None:
        return self._engine.facts()

    @property
    def foreign(self) -> ForeignJobs | None:
        """The jobs of others; None: such an engine shows none."""
        return self._engine.foreign if isinstance(self._engine, ShowsForeignJobs) else None

    def render(self, request: AttemptRequest) -> str:
        """With a line in place of the source that starts a worker, which is the same for every attempt."""
        launch = self._launch(request, digest="0" * 16)
        shown = {**launch.environment, worker_start.SOURCE: worker_start.SHOWN_SOURCE}
        return self._engine.document(replace(launch, environment=shown))

    def submit(self, request: AttemptRequest, secrets: Secrets) -> str | None:  # noqa: ARG002 - the worker fetches them
        """Hand the attempt to the engine's queue, unless it is there; NotYetError while it waits there."""
        name = self._note(request)
        try:
            seen = self._seen
            job = seen.jobs.get(name) if self._fresh(seen) else None
            if job is None or job.phase is EnginePhase.PREPARING:
                handle = self._start(request, name)
                raise self._wait(name, "handed to the engine", handle)
            if job.phase is EnginePhase.QUEUED:
                raise self._wait(name, job.message or "waits in the engine's queue", job.handle)
        except EngineAwayError as error:
            # It may have been started all the same: nothing is known until the engine answers.
            raise self._wait(name, f"{self.name} does not answer: {error}", None, again_in_s=AWAY_AGAIN_S) from error
        if job.phase is EnginePhase.ENDED and claim_free_nodes(self._run_directory(request), request):
            loss = job.loss or Loss(reason=Reason.ENGINE_UNAVAILABLE, message=job.message)
            if all(alive is Liveness.REVOKED for alive in self.observe(request)):
                raise LaunchError(loss.message, worker_start.reason_of_launch(loss.reason))
        if job.phase is EnginePhase.RUNNING and self._unheard.is_silent(name):
            unheard = worker_start.UNHEARD.format(url=request.server_url)
            raise self._wait(name, unheard, job.handle, again_in_s=AWAY_AGAIN_S)
        return job.handle

    def _start(self, request: AttemptRequest, name: str) -> str:
        packed_worker(self._context.workers)
        with self._lock:
            is_new = name not in self._tried and self._is_of_this_term(request)
            self._tried.add(name)
        try:
            handle = self._engine.start(self._launch(request, digest=package_digest()), is_new=is_new)
        except EngineRefusedError as error:
            self.revoke(request)
            raise LaunchError(f"{self.name}: {error}", Reason.LAUNCH_REFUSED) from error
        with self._lock:
            self._started.add(name)
        self._wake.set()
        return handle

    def _is_of_this_term(self, request: AttemptRequest) -> bool:
        """Whether no earlier leader can have handed it over: what that began may reach the engine after any list."""
        if self._leads_from is None or self._seen.asked_at <= self._leads_from:
            return False
        return self._context.age_s(request) < time.monotonic() - self._leads_from

    def _wait(self, name: str, message: str, handle: str | None, *, again_in_s: float = QUEUED_AGAIN_S) -> NotYetError:
        with self._lock:
            until = self._waits.setdefault(name, Future())
        return NotYetError(message, until, again_in_s=again_in_s, handle=handle)

    def observe(self, request: AttemptRequest) -> Sequence[Liveness]:
        """By the claims, which workers make over HTTP, and the engine's last list of jobs."""
        name, directory = self._note(request), self._run_directory(request)
        return [self._liveness(name, directory, node) for node in range(len(request.nodes))]

    def _note(self, request: AttemptRequest) -> str:
        """The name of an attempt, which is followed from now on."""
        name = self._name_of(request)
        with self._lock:
            self._attempts[name] = _Followed(request.attempt_id, len(request.nodes), time.monotonic())
        return name

    def _liveness(self, name: str, directory: RunDirectory, node: int) -> Liveness:
        claimant = directory.claimant(node)
        if claimant is None:
            return Liveness.UNCLAIMED
        if claimant.get("revoked"):
            return Liveness.REVOKED
        claimed_from = self._claimed_from.setdefault((name, node), time.monotonic())
        seen = self._seen
        # A list from before the claim says nothing about the claimant.
        if seen.asked_at < claimed_from or not self._fresh(seen):
            return Liveness.UNKNOWN
        job = seen.jobs.get(name)
        if job is None or job.phase is EnginePhase.ENDED or node in job.node_losses:
            return Liveness.GONE
        return Liveness.ALIVE

    def loss(self, request: AttemptRequest, node: int) -> Loss | None:
        name = self._name_of(request)
        job = self._seen.jobs.get(name)
        if job is None:
            if self._run_directory(request).claimant(node) is None:
                return None
            return Loss(reason=Reason.ENGINE_CANCELLED, message=f"{self.name} does not know the job any more")
        return job.node_losses.get(node) or job.loss

    def endpoint(self, request: AttemptRequest, node: int, host: str, port: int) -> str | None:  # noqa: ARG002
        """On the address that the engine names, whatever the worker says."""
        job = self._seen.jobs.get(self._name_of(request))
        address = job.addresses.get(node) if job is not None else None
        return f"{address}:{port}" if address else None

    def stop(self, request: AttemptRequest, control: Control) -> None:
        self._run_directory(request).set_control(control.to_json())

    def kill(self, request: AttemptRequest) -> None:
        self._cancel(self._name_of(request))

    def revoke(self, request: AttemptRequest) -> None:
        """Take the free claims first: a worker that starts all the same ends at once."""
        claim_free_nodes(self._run_directory(request), request)
        name = self._name_of(request)
        if all(alive is Liveness.REVOKED for alive in self.observe(request)):
            try:
                self._cancel(name)
            except EngineAwayError as error:
                _log.warning("%s is cancelled on %s when that answers: %s", request.attempt_id, self.name, error)
                with self._lock:
                    self._to_cancel.add(name)

    def sweep(self, request: AttemptRequest, node: int) -> None:
        """The engine ends what is left of a job; nothing that it lists as ended runs."""

    def _cancel(self, name: str) -> None:
        job = self._engine.find(name)
        if job is not None and job.phase is not EnginePhase.ENDED:
            self._engine.cancel(job.handle)
        self._wake.set()

    def _launch(self, request: AttemptRequest, *, digest: str) -> EngineLaunch:
        return worker_start.launch(
            request,
            self._options,
            instance=self._context.instance,
            digest=digest,
            node_variable=self._engine.node_variable,
            ca_pem=self._context.ca_pem,
        )

    def _name_of(self, request: AttemptRequest) -> str:
        return engine_name(self._context.instance, request.attempt_id)

    # -- following --

    def _fresh(self, seen: _Seen) -> bool:
        return time.monotonic() - seen.asked_at < max(STALE_S, 3 * self._options.poll_s)

    def _follow(self) -> None:
        while not self._stopping.is_set():
            try:
                self.poll()
                if self._is_away:
                    _log.info("%s answers again", self.name)
                self._is_away = False
            except EngineAwayError as error:
                if not self._is_away:
                    _log.warning("%s does not answer: %s", self.name, error)
                self._is_away = True
            except Exception:
                _log.exception("the jobs on %s cannot be followed", self.name)
            self._pause()

    def _pause(self) -> None:
        if self._attempts and not self._is_away:
            if not self._wake.is_set():
                self._engine.wait(self._options.poll_s)
        else:
            self._wake.wait(IDLE_EVERY_S if not self._is_away else max(self._options.poll_s, 2.0))
        self._wake.clear()

    def poll(self) -> None:
        """Take in the engine's jobs, wake those who wait for a change, and tidy up after what has ended."""
        if time.monotonic() - self._nodes_at > NODES_EVERY_S:
            self._take_nodes()
        known, asked_at = self._seen.jobs, time.monotonic()
        jobs = dict(self._engine.jobs())
        with self._lock:
            self._started -= jobs.keys()
            self._listed |= jobs.keys() & self._attempts.keys()
            unlisted = {name for name, _ in list(self._claimed_from)} - self._listed - self._found.keys()
            missing = [*self._started, *(unlisted - jobs.keys() - self._started)]
        jobs |= {name: job for name, job in self._found.items() if job is not None and name not in jobs}
        lost: set[str] = set()
        for name in missing:
            # A list may be older than the start that it does not show.
            if (job := self._engine.find(name)) is not None:
                jobs[name] = job
            with self._lock:
                if job is None and name in self._started:
                    lost.add(name)  # it is to be handed over again
                self._started.discard(name)
                if name in unlisted and (job is None or job.phase is EnginePhase.ENDED):
                    self._found[name] = job
        self._seen = _Seen(jobs=jobs, asked_at=asked_at)
        # Most are the same objects as before, of thousands.
        changed = {name for name, job in jobs.items() if (last := known.get(name)) is not job and last != job}
        changed |= lost | (known.keys() - jobs.keys())
        for name in changed:
            with self._lock:
                until, attempt = self._waits.pop(name, None), self._attempts.get(name)
            if until is not None:
                until.set_result(None)
            elif attempt is not None:
                self._context.hint(attempt.attempt_id)
        if not self._context.leads():
            self._forget_term()
        else:
            self._leads_from = asked_at if self._leads_from is None else self._leads_from
            self._tidy(jobs, everything=asked_at - self._leads_from > UNKNOWN_AFTER_S)

    def _take_nodes(self) -> None:
        before, now = self._nodes, time.time()
        self._nodes = [replace(node, pool=self.name, last_seen_at=now) for node in self._engine.nodes()]
        self._nodes_at = time.monotonic()
        if [replace(node, last_seen_at=now) for node in before] != self._nodes:
            self._context.on_nodes()

    def _forget_term(self) -> None:
        """Another server leads, which sees by the run directories what is over and what was withdrawn."""
        self._leads_from = None
        with self._lock:
            for known in (self._attempts, self._claimed_from, self._waits, self._found):
                known.clear()
            for names in (self._tried, self._listed, self._to_cancel, self._not_withdrawn):
                names.clear()

    def _tidy(self, jobs: Mapping[str, EngineJob], *, everything: bool) -> None:
        """Remove what ended jobs left on the engine, and cancel jobs whose attempt is over or gone. `everything`: what
        nobody has asked for by now, nobody will; before that, run directories may be missing that are yet to be made or
        mounted."""
        with self._lock:
            withdrawn, known = set(self._to_cancel), set(self._attempts)
            # Nobody observes attempts that are over: what still runs of them does not end by itself.
            since = time.monotonic() - UNKNOWN_AFTER_S
            observed = {name for name, attempt in self._attempts.items() if attempt.observed_at >= since}
            waiting = (self._not_withdrawn & self._waits.keys()) - withdrawn
        for name, job in jobs.items():
            if name in waiting and job.phase is EnginePhase.QUEUED:
                continue  # its leader is told of every change, and does not ask meanwhile
            is_over = functools.partial(self._context.is_over, job, if_missing=everything)
            if job.phase is EnginePhase.ENDED:
                if (everything and name not in known) or is_over():
                    self._engine.forget(job.handle)
                    self._found.pop(name, None)
            elif name in withdrawn or self._was_withdrawn(name, job) or (name not in observed and is_over()):
                self._engine.cancel(job.handle)
        self._not_withdrawn &= jobs.keys()
        with self._lock:
            self._to_cancel -= withdrawn
            ended = [
                name
                for name, attempt in self._attempts.items()
                if name not in jobs and self._context.has_ended(attempt.attempt_id, attempt.node_count)
            ]
            self._tried.difference_update(ended)
            self._listed -= set(ended)
            for name in ended:
                self._waits.pop(name, None)
                self._found.pop(name, None)
                self._unheard.forget(name)
                for node in range(self._attempts.pop(name).node_count):
                    self._claimed_from.pop((name, node), None)

    def _was_withdrawn(self, name: str, job: EngineJob) -> bool:
        """Whether an earlier leader took all claims of an attempt that waits, and died before the engine was told."""
        if job.phase is not EnginePhase.QUEUED or name in self._not_withdrawn:
            return False
        if self._context.is_over(job, if_missing=False):
            return True
        self._not_withdrawn.add(name)
        return False
