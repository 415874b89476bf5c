"""The leader's loop: view -> pure core -> one commit -> act. Each pass reads what to do next from the committed jobs,
so that every step can be repeated; the memory of recent actions only saves repeating them."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection

from trainmaster.server.coordinator.actions import AttemptActions
from trainmaster.server.coordinator.admission import Admission
from trainmaster.server.coordinator.checkpoints import prune
from trainmaster.server.coordinator.cluster_view import NodeReports, StoredView, freed_real_gpus
from trainmaster.server.coordinator.leadership import Leadership
from trainmaster.server.coordinator.threads import LoopWaker
from trainmaster.server.core import commands, endings, observations
from trainmaster.server.core.errors import NotLeaderError, StoreUnavailableError, TrainmasterError
from trainmaster.server.core.job import Change, Job, merge
from trainmaster.server.core.states import JobStatus
from trainmaster.server.scheduling.placement import occupied
from trainmaster.server.scheduling.preemption import drain
from trainmaster.server.scheduling.schedule import Plan, schedule
from trainmaster.server.scheduling.view import ClusterView
from trainmaster.server.settings.telemetry import METERS
from trainmaster.server.store import jobs, leases, nodes
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

_log = logging.getLogger(__name__)
_EVERYTHING = Scope.everything()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopPace:
    """How often the loop looks without a hint."""

    poll_s: float = 1.0
    """Running attempts and timers."""
    inventory_s: float = 15.0
    gap_s: float = 30.0
    """A longer pause between two looks means that the machine slept, or that nobody led."""
    occupied_s: float = 2.0
    """The inventory, while a GPU is only waiting for its memory to be freed."""
    behind_s: float = 0.1
    """Between two observations of attempts that report more than one observation reads, however many hints arrive."""


PLACEMENTS_PER_PASS = 256
"""These are committed and launched before more are planned."""
REST_FACTOR = 4.0
"""New jobs wait this many times the CPU time of the last pass: so a thousand jobs do not cause a thousand passes."""
REST_MAX_S = 0.05
MOST_BEHIND = 20
"""Attempts that are read in turns; of more, several are read in one turn."""
DROP_AFTER = 3
"""Reports that failed to commit this often are dropped: they must not keep their job from ending."""
FAILED_WAIT_S = 5.0
"""Before a job whose change could not be committed is looked at again."""
STUCK_AFTER_S = 60.0
"""A leader's loop that finished no pass for so long is stuck."""


class Coordinator:
    """Leads while its server holds the lease; otherwise waits."""

    def __init__(
        self,
        database: Database,
        *,
        reports: NodeReports,
        leadership: Leadership,
        actions: AttemptActions,
        admission: Admission,
        stalled_after_s: float = endings.STALLED_AFTER_S,
        clock: Callable[[], float] = time.time,
        pace: LoopPace | None = None,
    ) -> None:
        self._database = database
        self._reports = reports
        self._leadership = leadership
        self._actions = actions
        self._admission = admission
        self._stalled_after_s = stalled_after_s
        self._clock = clock
        self._pace = pace or LoopPace()
        self._alarm = LoopWaker(foreign_writes=database.data_version, poll_s=self._pace.poll_s)
        self._thread: threading.Thread | None = None
        self._epoch: int | None = None
        self._stored = StoredView(database)
        self.view = ClusterView()
        self._plan = Plan()
        self._polled_at: float | None = None
        self._polled_now = 0.0
        self._inventory_at: float | None = None
        self._awake_since = 0.0
        self._next_looks: dict[str, float] = {}
        """Attempts that are not looked at before a time, by the monotonic clock."""
        self._uncommitted: Counter[str] = Counter()
        """How often in a row a change of a job could not be committed."""
        self._finished_at = time.monotonic()

    # -- for other threads --

    def hint(self, subject: str) -> None:
        """Look soon: at one attempt (by its id), or at the feed of events. Any thread may call it."""
        self._alarm.hint(subject)

    def problem(self) -> str | None:
        """Why nothing is being coordinated here; None when all is well. Any thread may call it."""
        if self._thread is not None and not self._thread.is_alive():
            return "the coordinator's thread has ended"
        idle_s = time.monotonic() - self._finished_at
        return f"the coordinator finished no pass for {idle_s:.0f} s" if idle_s > STUCK_AFTER_S else None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the pass and stop; running jobs continue."""
        self._alarm.stop()
        if self._thread is not None:
            self._thread.join()
        self._actions.close()

    # -- the loop --

    def _run(self) -> None:
        rest_s = 0.0
        while not self._alarm.stopped:
            try:
                next_look = min(self._next_looks.values(), default=float("inf"))
                hinted = self._alarm.wait(rest_s, next_look - time.monotonic()) | self._due_looks()
                began = time.thread_time()
                self.run_pass(hinted)
                rest_s = min(REST_FACTOR * (time.thread_time() - began), REST_MAX_S)
                self._finished_at = time.monotonic()
                self._leadership.progressed()
            except NotLeaderError:
                _log.warning("another server leads now")
                self._leadership.lost()
                self._epoch = None
            except TrainmasterError as error:
                _log.warning("pass given up: %s", error.message)
                self._alarm.rest(0.5)
            except Exception:
                _log.exception("pass failed; the next one starts from the committed state")
                self._epoch = None
                self._alarm.rest(0.5)

    def run_pass(self, hinted: frozenset[str] = frozenset()) -> None:
        epoch = self._leadership.epoch
        if epoch is None:
            self._epoch = None
            return
        began = time.perf_counter()
        if epoch != self._epoch:
            self._take_over(epoch)
        now = self._clock()
        if self._reports.is_due():
            self._polled_at = self._inventory_at = None
        timed = self._is_time(now)
        before = self.view
        self.view, touched = self._stored.caught_up(self.view)
        if self.view.nodes is not before.nodes:
            self._reports.refresh()
        looked_at = self._looked_at(now, hinted, everything=timed)
        changes = self._observe(now, looked_at, everything=timed)
        self._admit(now, changes)
        ahead = self.view.with_jobs(change.job for change in changes.values())
        if freed_real_gpus(self.view, changes.values()):
            self.view = self._reports.take_into(self.view, ahead)
            ahead = ahead.with_nodes(self.view.nodes.values())
        resized = self.view.nodes is not before.nodes or self.view.queues is not before.queues
        unfinished = len(self._plan.placements) >= PLACEMENTS_PER_PASS
        if timed or resized or unfinished or self._worth_scheduling(before, ahead, touched | changes.keys()):
            self._place(now, ahead, changes)
        if timed:
            self._drain(epoch, now, ahead, changes)
        self._commit(epoch, changes.values())
        self._actions.act(self.view, now, looked_at.keys() | touched | changes.keys())
        METERS.passes_s.observe(time.perf_counter() - began)

    def _is_time(self, now: float) -> bool:
        """Whether this pass looks at everything; by the monotonic clock."""
        tick = time.monotonic()
        if self._polled_at is not None and tick - self._polled_at < self._pace.poll_s:
            return False
        set_back = now < self._polled_now
        if self._polled_at is None or tick - self._polled_at > self._pace.gap_s or set_back:
            self._awake_since = now
        self._polled_at, self._polled_now = tick, now
        every_s = self._pace.occupied_s if occupied(self.view.nodes.values()) else self._pace.inventory_s
        if self._inventory_at is None or tick - self._inventory_at >= every_s:
            self._inventory_at = tick
            self.view = self._reports.take_into(self.view, self.view)
        return True

    def _take_over(self, epoch: int) -> None:
        """Begin to lead: nothing of an earlier term is trusted."""
        self.view = self._stored.read()
        self._actions.forget()
        self._polled_at = self._inventory_at = None
        self._epoch = epoch

    def _looked_at(self, now: float, hinted: frozenset[str], *, everything: bool) -> dict[str, Job]:
        """The jobs with an attempt, by id, that were hinted at; or all of which there may be anything to see."""
        holding = self.view.holding
        jobs = (holding.get(subject.rpartition(".")[0]) for subject in hinted)
        found = {job.job_id: job for job in jobs if job is not None}
        if everything:
            quiet = self._actions.is_quiet
            found |= {job_id: job for job_id, job in holding.items() if not quiet(job, now)}
        return found

    def _observe(self, now: float, looked_at: Mapping[str, Job], *, everything: bool) -> dict[str, Change]:
        """The changes that reports, and with `everything` the clock, make to jobs with an attempt."""
        changes: dict[str, Change] = {}
        used = self._last_use() if everything else {}
        for job in looked_at.values():
            attempt_id = f"{job.job_id}.{job.live.number}"
            waits = time.monotonic() < self._next_looks.get(attempt_id, 0.0)
            change = None if waits else self._observe_one(job, now)
            latest = change.job if change else job
            if everything and latest.attempt is not None:
                timed = endings.due(
                    latest,
                    now=now,
                    last_activity_at=used.get(job.job_id),
                    heard_at=self._actions.heard_at(latest),
                    stalled_after_s=self._stalled_after_s,
                    awake_since=self._awake_since,
                )
                if timed is not None:
                    change = merge(change, timed) if change else timed
            if change is not None:
                changes[job.job_id] = change
        return changes

    def _due_looks(self) -> frozenset[str]:
        due = frozenset(attempt_id for attempt_id, at in self._next_looks.items() if at <= time.monotonic())
        for attempt_id in due:
            del self._next_looks[attempt_id]
        return due

    def _observe_one(self, job: Job, now: float) -> Change | None:
        try:
            if (told := self._actions.take_outcome(job, now)) is not None:
                return told
            observation = self._actions.observe(job, self.view)
            if observation is None:
                return None
            if observation.behind:
                wait_s = self._pace.behind_s * min(1 + len(self._next_looks), MOST_BEHIND)
                self._next_looks[f"{job.job_id}.{job.live.number}"] = time.monotonic() + wait_s
            if self._uncommitted[job.job_id] >= DROP_AFTER:
                observation = observation.without_reports(
                    f"reports could not be stored {DROP_AFTER} times in a row; dropped"
                )
            return observations.observe(job, observation, now=now)
        except Exception:
            # One unreadable run directory must not hold up every other job.
            _log.exception("job %s could not be observed", job.job_id)
            return None

    def _admit(self, now: float, changes: dict[str, Change]) -> None:
        for job in self.view.pending.values():
            try:
                admitted = self._admission.decide(job, now=now)
            except Exception:
                _log.exception("job %s could not be looked at for admission", job.job_id)
                continue
            if admitted is not None:
                changes[job.job_id] = admitted

    def _worth_scheduling(self, before: ClusterView, ahead: ClusterView, touched: Iterable[str]) -> bool:
        """Whether the scheduler could start anything that it could not at the end of the last pass."""
        for job_id in touched:
            job = ahead.jobs.get(job_id)
            if job is not None and job.status is JobStatus.QUEUED and not self._plan.blocks(job):
                return True
            if job_id in before.holding and job_id not in ahead.holding:
                return True
        return False

    def _place(self, now: float, ahead: ClusterView, changes: dict[str, Change]) -> None:
        """Start what fits, in the same commit as the changes that made room for it."""
        self._plan = schedule(ahead, now=now, limit=PLACEMENTS_PER_PASS)
        if len(self._plan.placements) >= PLACEMENTS_PER_PASS:
            self.hint("")  # There may be more to start.
        METERS.placements += len(self._plan.placements)
        METERS.preemptions += len(self._plan.preemptions)
        for placement in self._plan.placements:
            token = secrets.token_urlsafe(24)
            _add(changes, observations.place(placement.job, now=now, shares=placement.shares, token=token))
        victims: defaultdict[str, list[str]] = defaultdict(list)
        for preemption in self._plan.preemptions:
            by = preemption.by
            victims[by.job_id].append(preemption.victim.job_id)
            message = f"makes room for a job of priority {by.priority}"
            _add(changes, commands.preempt(preemption.victim, now=now, message=message))
        for job_id, preempted in victims.items():
            _add(changes, commands.make_room(ahead.jobs[job_id], now=now, victims=preempted))

    def _drain(self, epoch: int, now: float, ahead: ClusterView, changes: dict[str, Change]) -> None:
        """Evict jobs from nodes that are drained by force, and record which nodes are empty."""
        drainage = drain(ahead)
        for eviction in drainage.evictions:
            job, node = eviction.job, eviction.node
            why = f"node {node.node_id} is drained" + (f": {node.drain_reason}" if node.drain_reason else "")
            if changes.get(job.job_id) is None or changes[job.job_id].job == job:
                _add(changes, commands.preempt(job, now=now, message=why, grace_s=node.drain_grace_s))
        if drainage.empty:

            def work(connection: Connection) -> None:
                leases.check(connection, _EVERYTHING, epoch)
                for node_id in drainage.empty:
                    nodes.drained(connection, _EVERYTHING, node_id, now)

            self._database.write_now(work)
            self.view = self._stored.with_cluster(self.view)

    def _commit(self, epoch: int, changes: Collection[Change]) -> None:
        """Commit all changes in one transaction, except those of jobs that somebody else changed meanwhile."""
        if not changes:
            return
        try:
            applied = self._write(epoch, changes)
        except (NotLeaderError, StoreUnavailableError):
            raise
        except Exception:
            _log.exception("a commit failed; its changes are committed one by one, and the view is built anew")
            applied = self._commit_singly(epoch, changes)
            self.view = self._stored.read()
        self.view = self.view.with_jobs(applied)
        if len(applied) < len(changes):
            self.hint("")

    def _commit_singly(self, epoch: int, changes: Iterable[Change]) -> list[Job]:
        """Commit each change in a transaction of its own, so that one that fails affects its own job only."""
        applied: list[Job] = []
        for change in changes:
            job_id = change.job.job_id
            try:
                applied += self._write(epoch, [change])
            except (NotLeaderError, StoreUnavailableError):
                raise
            except Exception:
                _log.exception("a change of job %s cannot be committed", job_id)
                self._uncommitted[job_id] += 1
                if (before := self.view.holding.get(job_id)) is not None:
                    self._next_looks[f"{job_id}.{before.live.number}"] = time.monotonic() + FAILED_WAIT_S
        return applied

    def _write(self, epoch: int, changes: Collection[Change]) -> list[Job]:
        """Write changes in one transaction; returns the jobs that nobody else changed meanwhile."""

        def work(connection: Connection) -> list[Job]:
            leases.check(connection, _EVERYTHING, epoch)
            return [job for change in changes if (job := _apply(connection, change)) is not None]

        applied = self._database.write_now(work)
        for change in changes:
            del self._uncommitted[change.job.job_id]
        return applied

    def _last_use(self) -> Mapping[str, float]:
        if not any(job.is_service for job in self.view.holding.values()):
            return {}
        with self._database.read() as connection:
            return jobs.last_uses(connection, _EVERYTHING)


def _apply(connection: Connection, change: Change) -> Job | None:
    """Store a change and prune surplus checkpoints; returns the job, or None when somebody else was first."""
    if not jobs.apply(connection, _EVERYTHING, change):
        return None
    return prune(connection, change.job) if change.checkpoints else change.job


def _add(changes: dict[str, Change], change: Change | None) -> None:
    """Add a change of a job that was decided after the earlier change of the same job."""
    if change is not None:
        earlier = changes.get(change.job.job_id)
        changes[change.job.job_id] = merge(earlier, change) if earlier else change
