"""Doing what the committed state of a job calls for: launch, stop, revoke, sweep.

Every act is derived from the job's row and may be repeated. What was done lately is remembered only to
save doing it again on every pass.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from trainmaster import failpoints
from trainmaster.backends.base import Backend, LaunchError
from trainmaster.coordinator.launching import attempt_request, run_directory
from trainmaster.coordinator.watch import look
from trainmaster.core.endings import refuse_launch
from trainmaster.core.errors import NotFoundError, TrainmasterError
from trainmaster.core.job import Change, Checkpoint, Job
from trainmaster.core.sight import Liveness, Sight
from trainmaster.core.states import JobStatus
from trainmaster.core.stopping import control_for
from trainmaster.protocol.control import Control
from trainmaster.protocol.reasons import Reason
from trainmaster.protocol.request import AttemptRequest
from trainmaster.protocol.rundir import exit_document
from trainmaster.scheduling.view import ClusterView
from trainmaster.storage import Roots

_log = logging.getLogger(__name__)

LAUNCH_AGAIN_S = 10.0
"""An attempt that nobody claimed by then is handed to its backend once more."""
LAUNCH_TIMEOUT_S = 120.0
"""An attempt that nobody claimed by then is withdrawn, and the job is placed anew."""


@dataclass(slots=True)
class _Memory:
    """What this process did for one attempt."""

    launched_at: float | None = None
    revoked: bool = False
    control: Control | None = None
    lost: set[int] = field(default_factory=set)
    """Nodes whose worker died without a word; what they left running is to be swept."""
    swept: set[int] = field(default_factory=set)
    busy: bool = False
    failure: tuple[str, Reason] | None = None
    """Why a launch failed of which nothing runs."""
    request: AttemptRequest | None = None


class Acting:
    """Carries acts out in a small pool of threads, one at a time for each attempt."""

    def __init__(
        self,
        *,
        backends: Mapping[str, Backend],
        roots: Roots,
        checkpoint: Callable[[Job, str], Checkpoint],
        hint: Callable[[str], None],
        hint_socket: str | None,
        server_url: str | None,
        pool: Executor | None = None,
    ) -> None:
        self._backends = backends
        self._roots = roots
        self._checkpoint = checkpoint
        self._hint = hint
        self._hint_socket = hint_socket
        self._server_url = server_url
        self._memory: dict[str, _Memory] = {}
        self._lock = threading.Lock()
        self._pool = pool or ThreadPoolExecutor(max_workers=4, thread_name_prefix="act")

    def forget(self) -> None:
        """Trust nothing of an earlier reign."""
        with self._lock:
            self._memory = {}

    def close(self) -> None:
        """Finish what is under way."""
        self._pool.shutdown(wait=True)

    def act(self, view: ClusterView, now: float) -> None:
        """Start the acts that the committed jobs call for."""
        live: set[str] = set()
        for job in view.active():
            attempt_id = f"{job.job_id}.{job.live.number}"
            live.add(attempt_id)
            memory = self._memory.setdefault(attempt_id, _Memory())
            if memory.busy:
                continue
            work = self._next(job, view, memory, now)
            if work is not None:
                memory.busy = True
                self._pool.submit(self._run, attempt_id, memory, work)
        if len(self._memory) > len(live):
            self._memory = {attempt_id: memory for attempt_id, memory in self._memory.items() if attempt_id in live}

    def look(self, job: Job) -> Sight | None:
        """What is to be seen of a job's attempt now; None when it was not launched yet."""
        memory = self._memory.setdefault(f"{job.job_id}.{job.live.number}", _Memory())
        directory = run_directory(self._roots, job.job_id, job.live.number)
        try:
            request = memory.request or directory.request()
        except FileNotFoundError:
            return None
        memory.request = request
        liveness = list(self._backends[job.live.backend].observe(request))
        for node, alive in enumerate(liveness):
            lost = alive in (Liveness.GONE, Liveness.REBOOTED) and node not in job.live.exits
            if lost and node not in memory.swept and directory.document(exit_document(node)) is None:
                # Its strays may still be writing; until they are swept it is not known to be gone.
                memory.lost.add(node)
                liveness[node] = Liveness.UNKNOWN
        return look(job, directory, liveness, ranks_per_node=request.launch.ranks_per_node, roots=self._roots)

    def take_failure(self, job: Job, now: float) -> Change | None:
        """What a launch that failed makes of its job."""
        memory = self._memory.get(f"{job.job_id}.{job.live.number}")
        if memory is None or memory.failure is None:
            return None
        (message, reason), memory.failure = memory.failure, None
        return refuse_launch(job, now=now, attempt=job.live.number, message=message, reason=reason)

    def _next(self, job: Job, view: ClusterView, memory: _Memory, now: float) -> Callable[[], None] | None:
        """The one thing to do next for an attempt, if any."""
        attempt = job.live
        backend = self._backends[attempt.backend]
        unclaimed = len(attempt.claimed) < len(attempt.shares)
        withdrawn = attempt.stop is not None or now - attempt.created_at > LAUNCH_TIMEOUT_S
        if job.status is JobStatus.SCHEDULING and unclaimed and withdrawn and not memory.revoked:
            memory.revoked = True
            return lambda: backend.revoke(self._prepared(job, view, memory))
        if job.status is JobStatus.SCHEDULING and unclaimed and not withdrawn:
            if memory.launched_at is None or now - memory.launched_at > LAUNCH_AGAIN_S:
                memory.launched_at = now
                return lambda: self._launch(backend, job, view, memory)
            return None
        control = control_for(job)
        if control is None:
            # What was wanted was done, and may be wanted again.
            memory.control = None
        elif not _same(control, memory.control):
            memory.control = control
            return lambda: backend.stop(self._prepared(job, view, memory), control)
        if memory.lost:
            return lambda: self._sweep(backend, job, view, memory)
        return None

    def _run(self, attempt_id: str, memory: _Memory, work: Callable[[], None]) -> None:
        failpoints.reach("act.before")
        try:
            work()
        except Exception:
            _log.exception("%s: an act failed; it is tried again", attempt_id)
            memory.control = None
            memory.revoked = False
        failpoints.reach("act.after")
        memory.busy = False
        self._hint(attempt_id)

    def _launch(self, backend: Backend, job: Job, view: ClusterView, memory: _Memory) -> None:
        try:
            request = self._prepared(job, view, memory)
            failpoints.reach("act.before_submit")
            backend.submit(request)
        except LaunchError as error:
            memory.failure = (str(error), error.reason)
        except TrainmasterError as error:
            memory.failure = (error.message, Reason.LAUNCH_REFUSED)
        except OSError as error:
            if memory.request is not None:
                raise  # It was laid out: somebody may have claimed it.
            memory.failure = (f"its run directory could not be made: {error}", Reason.STORAGE_UNAVAILABLE)
        if memory.failure is not None:
            _log.warning("%s was not launched: %s", job.job_id, memory.failure[0])

    def _prepared(self, job: Job, view: ClusterView, memory: _Memory) -> AttemptRequest:
        """The attempt's request, laid out on disk."""
        directory = run_directory(self._roots, job.job_id, job.live.number)
        try:
            memory.request = memory.request or directory.request()
        except FileNotFoundError:
            request = self._new_request(job, view)
            directory.create(request)
            memory.request = request
        return memory.request

    def _new_request(self, job: Job, view: ClusterView) -> AttemptRequest:
        resume = None
        if job.live.resume_checkpoint_id:
            try:
                resume = self._checkpoint(job, job.live.resume_checkpoint_id)
            except NotFoundError as error:
                raise LaunchError(
                    f"checkpoint {job.live.resume_checkpoint_id} is gone", Reason.LAUNCH_REFUSED
                ) from error
        return attempt_request(
            job,
            nodes=view.nodes,
            roots=self._roots,
            resume=resume,
            hint_socket=self._hint_socket,
            server_url=self._server_url,
        )

    def _sweep(self, backend: Backend, job: Job, view: ClusterView, memory: _Memory) -> None:
        request = self._prepared(job, view, memory)
        for node in sorted(memory.lost):
            backend.sweep(request, node)
            memory.swept.add(node)
            memory.lost.discard(node)


def _same(one: Control, other: Control | None) -> bool:
    return other is not None and (one.stop, one.save, one.dump_stacks) == (other.stop, other.save, other.dump_stacks)
