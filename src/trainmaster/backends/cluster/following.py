"""Follows the attempts of the server on the engine of a cluster: one thread lists all of them, in one request a time,
wakes those who wait for a change, and tidies up. Nobody who observes a job waits for an engine that hangs."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainmaster.backends.base import Change
from trainmaster.backends.cluster.context import ClusterContext
from trainmaster.backends.cluster.engine import ClusterEngine, EngineAwayError, EngineJob, EnginePhase
from trainmaster.backends.cluster.unheard import Unheard
from trainmaster.protocol.request import AttemptRequest
from trainmaster.server.core.reports import EngineOutage
from trainmaster.server.core.resources import Node

_log = logging.getLogger(__name__)

STALE_S = 30.0
"""An older list of jobs says nothing about the present."""
NODES_EVERY_S = 15.0
IDLE_EVERY_S = 10.0
"""How often the engine is asked while the server has no attempt there."""
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
class SeenJobs:
    """The engine's jobs as they were listed."""

    jobs: Mapping[str, EngineJob]
    asked_at: float = float("-inf")
    """When the engine was asked, by the monotonic clock."""


class _Reported:
    """That the engine has reported a change. As many wait as jobs do, and a future has 2 KB."""

    __slots__ = ("_calls", "_is_done")
    _lock = threading.Lock()
    """Of all of them: it is held for an instant."""

    def __init__(self) -> None:
        self._is_done = False
        self._calls: tuple[Callable[[_Reported], object], ...] = ()

    def done(self) -> bool:
        return self._is_done

    def add_done_callback(self, call: Callable[[_Reported], object], /) -> None:
        with self._lock:
            if not self._is_done:
                self._calls = (*self._calls, call)
                return
        call(self)

    def happen(self) -> None:
        with self._lock:
            self._is_done, calls = True, self._calls
            self._calls = ()
        for call in calls:
            call(self)


class EngineFollower:
    """Attempts are known by their names on the engine. Any thread may call its methods; `poll` is for one at a time."""

    def __init__(self, engine: ClusterEngine, context: ClusterContext, *, poll_s: float) -> None:
        self.nodes: Sequence[Node] = ()
        """As last reported."""
        self.seen = SeenJobs(jobs={})
        """As last listed."""
        self.unheard = Unheard()
        self._engine = engine
        self._context = context
        self._poll_s = poll_s
        self._nodes_at = float("-inf")
        self._attempts: dict[str, _Followed] = {}
        """Attempts that were submitted or observed here."""
        self._claimed_from: dict[tuple[str, int], float] = {}
        """When the claim of each node was first seen."""
        self._started: dict[str, str] = {}
        """Attempts that this process handed to the engine, and that no list shows yet -> as what."""
        self._tried: set[str] = set()
        """Attempts that this process has handed to the engine, or tried to."""
        self._listed: set[str] = set()
        """Those of the attempts that a list has shown."""
        self._found: dict[str, EngineJob | None] = {}
        """What the engine said of claimed attempts that no list shows: they may have ended while no server ran."""
        self._waits: dict[str, _Reported] = {}
        self._to_cancel: set[str] = set()
        """Attempts that were withdrawn while the engine was away."""
        self._not_withdrawn: set[str] = set()
        """Those whose claims were looked at since this server leads: what an earlier leader withdrew is known."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self.outage: EngineOutage | None = None
        """While the engine does not answer."""
        self._leads_from: float | None = None
        """Since when this server leads."""
        self._thread = threading.Thread(target=self._follow, name=f"follow {context.name}", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)  # the engine may hang

    def follow(self, name: str, request: AttemptRequest) -> None:
        """From now on, until it has ended."""
        with self._lock:
            self._attempts[name] = _Followed(request.attempt_id, len(request.nodes), time.monotonic())

    def begin_start(self, name: str, request: AttemptRequest) -> bool:
        """Note that an attempt is handed to the engine; returns whether nobody can have tried before."""
        with self._lock:
            is_new = name not in self._tried and self._is_of_this_term(request)
            self._tried.add(name)
        return is_new

    def has_started(self, name: str, message: str) -> None:
        """Look for an attempt that the engine has accepted."""
        with self._lock:
            self._started[name] = message
        self.look_now()

    def just_started(self, name: str) -> str | None:
        """The message of an attempt that this process has handed over since the last list was asked for: the list may
        show it as half handed over, or not at all."""
        with self._lock:
            return self._started.get(name)

    def look_now(self) -> None:
        """Ask the engine at once: something was changed there."""
        self._wake.set()

    def next_change(self, name: str) -> Change:
        """Is done when the engine reports a change of an attempt."""
        with self._lock:
            return self._waits.setdefault(name, _Reported())

    def cancel_later(self, name: str) -> None:
        """Cancel an attempt when the engine answers again."""
        with self._lock:
            self._to_cancel.add(name)

    def claimed_from(self, name: str, node: int) -> float:
        """Since when the claim of a node is known; by now."""
        return self._claimed_from.setdefault((name, node), time.monotonic())

    def is_fresh(self, seen: SeenJobs) -> bool:
        return time.monotonic() - seen.asked_at < max(STALE_S, 3 * self._poll_s)

    def poll(self) -> None:
        """Take in the engine's jobs, wake those who wait for a change, and tidy up after what has ended."""
        if time.monotonic() - self._nodes_at > NODES_EVERY_S:
            self._take_nodes()
        known, asked_at = self.seen.jobs, time.monotonic()
        jobs = dict(self._engine.jobs())
        with self._lock:
            for name in self._started.keys() & jobs.keys():
                del self._started[name]
            self._listed |= jobs.keys() & self._attempts.keys()
            unlisted = {name for name, _ in list(self._claimed_from)} - self._listed - self._found.keys()
            missing = [*self._started, *(unlisted - jobs.keys() - self._started.keys())]
        jobs |= {name: job for name, job in self._found.items() if job is not None and name not in jobs}
        lost: set[str] = set()
        for name in missing:
            # A list may be older than the start that it does not show.
            if (job := self._engine.find(name)) is not None:
                jobs[name] = job
            with self._lock:
                if job is None and name in self._started:
                    lost.add(name)  # it is to be handed over again
                self._started.pop(name, None)
                if name in unlisted and (job is None or job.phase is EnginePhase.ENDED):
                    self._found[name] = job
        self.seen = SeenJobs(jobs=jobs, asked_at=asked_at)
        # Most are the same objects as before, of thousands.
        changed = {name for name, job in jobs.items() if (last := known.get(name)) is not job and last != job}
        changed |= lost | (known.keys() - jobs.keys())
        for name in changed:
            with self._lock:
                until, attempt = self._waits.pop(name, None), self._attempts.get(name)
            if until is not None:
                until.happen()
            elif attempt is not None:
                self._context.hint(attempt.attempt_id)
        if not self._context.leads():
            self._forget_term()
        else:
            self._leads_from = asked_at if self._leads_from is None else self._leads_from
            self._tidy(jobs, everything=asked_at - self._leads_from > UNKNOWN_AFTER_S)

    def _is_of_this_term(self, request: AttemptRequest) -> bool:
        """Whether no earlier leader can have handed it over: what that began may reach the engine after any list."""
        if self._leads_from is None or self.seen.asked_at <= self._leads_from:
            return False
        return self._context.age_s(request) < time.monotonic() - self._leads_from

    def _follow(self) -> None:
        while not self._stopping.is_set():
            try:
                self.poll()
                if self.outage is not None:
                    _log.info("%s answers again", self._context.name)
                self.outage = None
            except EngineAwayError as error:
                if self.outage is None:
                    _log.warning("%s does not answer: %s", self._context.name, error)
                since = time.time() if self.outage is None else self.outage.since
                self.outage = EngineOutage(since=since, problem=str(error))
            except Exception:
                _log.exception("the jobs on %s cannot be followed", self._context.name)
            self._pause()

    def _pause(self) -> None:
        if self._attempts and self.outage is None:
            if not self._wake.is_set():
                self._engine.wait(self._poll_s)
        else:
            self._wake.wait(IDLE_EVERY_S if self.outage is None else max(self._poll_s, 2.0))
        self._wake.clear()

    def _take_nodes(self) -> None:
        before, now = self.nodes, time.time()
        self.nodes = [replace(node, pool=self._context.name, last_seen_at=now) for node in self._engine.nodes()]
        self._nodes_at = time.monotonic()
        if [replace(node, last_seen_at=now) for node in before] != self.nodes:
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
        mounted, and jobs whose worker has just ended end by themselves."""
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
            else:
                is_left_over = everything and name not in observed
                if name in withdrawn or self._was_withdrawn(name, job) or (is_left_over and is_over()):
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
                self.unheard.forget(name)
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
