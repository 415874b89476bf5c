"""The actions that the committed state of a job calls for: launch, stop, revoke, sweep. Each is derived from the job's
row and may be repeated; `attempt_memory` has what was done recently."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from dataclasses import replace

from trainmaster.backends.base import Backend, LaunchError, NotYetError
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest, Control
from trainmaster.protocol.run_directory import RunDirectory, exit_document
from trainmaster.server import failpoints
from trainmaster.server.coordinator.attempt_memory import AttemptMemory
from trainmaster.server.coordinator.launch import Launches
from trainmaster.server.coordinator.observation import last_beat, observe_attempt
from trainmaster.server.coordinator.restoring import Restores
from trainmaster.server.coordinator.threads import ActionPools, PooledAction
from trainmaster.server.core.commands import control_for
from trainmaster.server.core.endings import record_engine_handle, record_launch_wait, refuse_launch, unclaimed_launches
from trainmaster.server.core.errors import StoreUnavailableError, TrainmasterError
from trainmaster.server.core.job import Change, Job
from trainmaster.server.core.reports import AttemptObservation, Liveness
from trainmaster.server.core.resources import Node
from trainmaster.server.core.states import JobStatus
from trainmaster.server.scheduling.view import ClusterView
from trainmaster.server.storage import RUNS, Location, Roots, run_directory

_log = logging.getLogger(__name__)

LAUNCH_AGAIN_S = 10.0
"""After this time, an attempt that no worker claimed is handed to its backend again."""
LAUNCH_TIMEOUT_S = 120.0
"""After this time, an attempt that no worker claimed is withdrawn, and the job is placed again. The time in which its
backend prepares something does not count."""
WAIT_TOLD_EVERY_S = 2.0
"""How often users see that progress."""


class AttemptActions:
    """Carries actions out in a small pool of threads, one at a time for each attempt."""

    def __init__(
        self,
        *,
        backends: Mapping[str, Backend],
        roots: Roots,
        launches: Launches,
        hint: Callable[[str], None],
        pool: Executor | None = None,
    ) -> None:
        self._backends = backends
        self._roots = roots
        self._launches = launches
        self._restores = Restores(launches.database, roots)
        self._hint = hint
        self._memory: dict[str, AttemptMemory] = {}
        self._refusals: dict[str, int] = {}
        """Launches of a job that were refused in a row."""
        self._acted_at = float("-inf")
        self._pools = ActionPools(pool)

    def forget(self) -> None:
        """Forget what was done in an earlier term as leader."""
        self._memory = {}

    def close(self) -> None:
        """Finish actions under way; the next leader does those that have not begun or that an engine holds up."""
        self._pools.close()
        self._restores.close()

    def act(self, view: ClusterView, now: float, only: Collection[str] | None = None) -> None:
        """Begin what is to be done for attempts. `only`: those of these jobs, as there is nothing to do for others."""
        if now < self._acted_at:
            only = None
            for memory in self._memory.values():
                memory.restart_waits()
        self._acted_at = now
        holding = view.holding
        for job in holding.values() if only is None else [holding[each] for each in only if each in holding]:
            attempt_id = _attempt_id(job)
            if job.live.claimed:
                self._refusals.pop(job.job_id, None)
            memory = self._memory.setdefault(attempt_id, AttemptMemory())
            if memory.busy or now < memory.not_before:
                continue
            act = self._next(job, view.nodes, memory, now)
            if act is not None:
                memory.busy = True
                self._pools.for_action(act, job.live.backend).submit(self._run, attempt_id, memory, act.work, now)
        for job_id in self._refusals.keys() - view.jobs.keys():
            del self._refusals[job_id]
        if len(self._memory) > len(holding):
            live = set(map(_attempt_id, holding.values()))
            for attempt_id in self._memory.keys() - live:
                self._tidy_up_after(attempt_id, self._memory[attempt_id])
            self._memory = {attempt_id: memory for attempt_id, memory in self._memory.items() if attempt_id in live}

    def is_quiet(self, job: Job, now: float) -> bool:
        """Whether an attempt waits for its backend, has said why, and nobody wants anything else of it: there is
        nothing to see or to do before the backend reports a change. Thousands may wait in the queue of a cluster."""
        memory = self._memory.get(_attempt_id(job))
        return memory is not None and memory.is_quiet(job, now)

    def observe(self, job: Job, view: ClusterView) -> AttemptObservation | None:
        """What can be seen of a job's attempt now; None when it was not launched yet."""
        memory = self._memory.setdefault(f"{job.job_id}.{job.live.number}", AttemptMemory())
        directory = run_directory(self._roots, job.job_id, job.live.number)
        if memory.request is None:
            memory.request = _readable(directory)
        if memory.request is None and not job.live.claimed:
            return None
        request = self._prepared(job, view.nodes, memory)
        backend = self._backends[job.live.backend]
        launching = memory.busy and not memory.revoked
        if memory.wait is not None:
            memory.request = None
        liveness = list(backend.observe(request))
        for node, alive in enumerate(liveness):
            if alive is Liveness.REVOKED and (launching or memory.refusal is not None):
                alive = Liveness.UNKNOWN  # The launch that withdrew it has yet to say why.
            if alive is Liveness.UNCLAIMED and node in job.live.claimed:
                alive = Liveness.GONE  # The claim itself was lost, with the worker that had it.
            if alive in (Liveness.GONE, Liveness.REBOOTED) and node not in job.live.exits:
                ended = directory.document(exit_document(node)) is not None
                if not ended and node not in memory.swept:
                    # Processes that it left may still write; until they are swept, it is not known to be gone.
                    memory.lost |= {node}
                    alive = Liveness.UNKNOWN
            liveness[node] = alive
        observation = observe_attempt(
            job,
            directory,
            liveness,
            ranks_per_node=request.launch.ranks_per_node,
            roots=self._roots,
            endpoint=functools.partial(backend.endpoint, request),
            loss=functools.partial(backend.loss, request) if request.engine_needs is not None else None,
        )
        if Liveness.REVOKED in liveness:
            observation = replace(observation, unclaimed_launches=unclaimed_launches(job, self._launches.attempts(job)))
        return observation

    def heard_at(self, job: Job) -> float | None:
        """The last heartbeat of a preparing attempt's workers, of the one that has been silent for longest."""
        if job.max_runtime_s is None or job.status is not JobStatus.PREPARING:
            return None
        return last_beat(job.live, run_directory(self._roots, job.job_id, job.live.number))

    def take_outcome(self, job: Job, now: float) -> Change | None:
        """The change of a job that follows from a launch that was carried out or refused."""
        if (memory := self._memory.get(f"{job.job_id}.{job.live.number}")) is None:
            return None
        if memory.refusal is not None:
            refusal, memory.refusal = memory.refusal, None
            before = self._refusals.get(job.job_id, 0)
            self._refusals[job.job_id] = before + 1
            return refuse_launch(
                job,
                now=now,
                attempt=job.live.number,
                message=str(refusal),
                reason=refusal.reason,
                before=before,
                again_in_s=refusal.again_in_s,
            )
        if memory.wait is not None and now - memory.wait_told_at >= WAIT_TOLD_EVERY_S:
            told = record_launch_wait(job, now=now, message=memory.wait.message)
            if told is not None:
                memory.wait_told_at = now
                return told
        if memory.handle != job.live.handle and memory.handle is not None:
            return record_engine_handle(job, now=now, handle=memory.handle)
        return None

    def _next(self, job: Job, nodes: Mapping[str, Node], memory: AttemptMemory, now: float) -> PooledAction | None:
        attempt = job.live
        backend = self._backends[attempt.backend]
        if job.status is JobStatus.SCHEDULING and len(attempt.claimed) < len(attempt.shares):
            act = self._next_for_unclaimed(job, nodes, memory, now)
            # A worker may die right after its claim: its node is swept, though the claim was never reported.
            if act is not None or (attempt.stop is None and not memory.lost):
                return act
        if (control := control_for(job)) is None:
            # The request was carried out, and may be made again.
            memory.control = None
        elif not _same(control, memory.control):
            memory.control = control
            return PooledAction(lambda: backend.stop(self._prepared(job, nodes, memory), control))
        if memory.lost:
            return PooledAction(lambda: self._sweep(backend, job, nodes, memory), slow=True)
        if memory.stop_is_overdue(attempt, now) and not memory.killed:
            memory.killed = True
            return PooledAction(lambda: backend.kill(self._prepared(job, nodes, memory)), slow=True)
        return None

    def _next_for_unclaimed(
        self, job: Job, nodes: Mapping[str, Node], memory: AttemptMemory, now: float
    ) -> PooledAction | None:
        backend = self._backends[job.live.backend]
        wait = memory.wait
        # What waited until now may be claimed from the next launch on.
        awaited_from = memory.claim_awaited_from if wait is None else None
        if job.live.stop is not None or (awaited_from is not None and now - awaited_from > LAUNCH_TIMEOUT_S):
            if memory.revoked:
                return None
            memory.revoked = True
            return PooledAction(lambda: self._launch(backend.revoke, job, nodes, memory), launches=True)
        again_s = LAUNCH_AGAIN_S if wait is None else 0.0 if wait.is_over else wait.again_in_s
        if memory.launched_at is not None and now - memory.launched_at < again_s:
            return None
        if awaited_from is None:
            memory.claim_awaited_from = now
        memory.launched_at = now

        def submit(request: AttemptRequest) -> str | None:
            self._restores.require(job, request)
            return backend.submit(request, self._launches.secrets(job))

        return PooledAction(lambda: self._launch(submit, job, nodes, memory), launches=True)

    def _run(self, attempt_id: str, memory: AttemptMemory, work: Callable[[], None], now: float) -> None:
        failpoints.reach("act.before")
        try:
            work()
            memory.failures = 0
        except Exception:
            wait_s = memory.failed(now)
            _log.exception("%s: an action failed; it is tried again in %.0f s", attempt_id, wait_s)
        failpoints.reach("act.after")
        memory.busy = False
        self._hint(attempt_id)

    def _launch(
        self, verb: Callable[[AttemptRequest], str | None], job: Job, nodes: Mapping[str, Node], memory: AttemptMemory
    ) -> None:
        """Lay out the run directory and hand the attempt to its backend, to be started or withdrawn."""
        try:
            request = self._prepared(job, nodes, memory)
            failpoints.reach("act.before_submit")
            memory.handle = verb(request)
            memory.wait = None
        except NotYetError as wait:
            if memory.has_to_wait(wait):
                attempt_id = _attempt_id(job)

                def wake(_: object) -> None:
                    if memory.wait is not None:
                        memory.wait.is_over = True
                    self._hint(attempt_id)

                wait.until.add_done_callback(wake)
        except LaunchError as error:
            memory.refusal = error
        except StoreUnavailableError:
            memory.launched_at = None  # It was not refused: try again.
            raise
        except TrainmasterError as error:
            memory.refusal = LaunchError(error.message, Reason.LAUNCH_REFUSED)
        except OSError as error:
            if memory.request is not None:
                raise  # The directory is complete: a worker may have claimed the attempt.
            memory.refusal = LaunchError(f"its run directory could not be made: {error}", Reason.STORAGE_UNAVAILABLE)
        if memory.refusal is not None:
            _log.warning("%s was not launched: %s", job.job_id, memory.refusal)

    def _prepared(self, job: Job, nodes: Mapping[str, Node], memory: AttemptMemory) -> AttemptRequest:
        """The attempt's request, laid out on disk; computed again from the job where a crash has left none."""
        if memory.request is None:
            directory = run_directory(self._roots, job.job_id, job.live.number)
            capable = self._backends[job.live.backend].capabilities
            request = _readable(directory) or self._launches.request(job, nodes, capable)
            directory.create(request, with_ranks=request.server_url is None)
            memory.request = request
        return memory.request

    def _sweep(self, backend: Backend, job: Job, nodes: Mapping[str, Node], memory: AttemptMemory) -> None:
        request = self._prepared(job, nodes, memory)
        for node in sorted(memory.lost):
            backend.sweep(request, node)
            memory.swept |= {node}
            memory.lost -= {node}

    def _tidy_up_after(self, attempt_id: str, memory: AttemptMemory) -> None:
        """Remove the working directory of an attempt, where its worker should have and died first or never started."""
        self._restores.forget(attempt_id)
        job_id, _, number = attempt_id.rpartition(".")
        directory = run_directory(self._roots, job_id, int(number))
        request = memory.request or _readable(directory)
        if request is None:
            return
        if request.confined or request.engine_needs is not None:
            self._pools.tidy(directory.close)
        if not request.launch.remove_working_directory:
            return
        work = Location(root=RUNS, path=f"{job_id}/{number}/work")

        def remove() -> None:
            try:
                self._roots.remove(work)
            except OSError as error:
                _log.warning("%s cannot be removed; it goes with its job: %s", work.uri, error)

        self._pools.tidy(remove)


def _attempt_id(job: Job) -> str:
    return f"{job.job_id}.{job.live.number}"


def _readable(directory: RunDirectory) -> AttemptRequest | None:
    """The request of a run directory; None when there is none, or a power cut damaged it. It can be trusted, because no
    job that could gain by it can write there (`protocol.run_directory`)."""
    try:
        return directory.request()
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):
        return None


def _same(one: Control, other: Control | None) -> bool:
    return other is not None and (one.stop, one.save, one.dump_stacks) == (other.stop, other.save, other.dump_stacks)
