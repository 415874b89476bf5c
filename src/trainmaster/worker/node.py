"""One node of one attempt, after its claim: staging, preparing steps, rendezvous, ranks, and their end.

One thread and one selector. The end of a process wakes it at once; files are polled. What the job does and reports is
on disk before anybody is told of it, so that the death of the server or of the worker loses nothing but time.
"""

from __future__ import annotations

import os
import selectors
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace

from trainmaster.protocol.documents import DISK_FULL_ERRNOS, disk_is_full, take_answer
from trainmaster.protocol.launch import LaunchStep, Readiness
from trainmaster.protocol.reasons import EXIT_STOPPED, Reason, StopCause
from trainmaster.protocol.request import AttemptRequest, Control
from trainmaster.protocol.run_directory import RunDirectory, endpoint_document, exit_document, log_stream
from trainmaster.protocol.secrets import Secrets
from trainmaster.protocol.sockets import send_hint
from trainmaster.worker.cgroups import Cgroup, MemoryWatch
from trainmaster.worker.local_http import ReadinessProbe
from trainmaster.worker.processes import StackDump, become_subreaper, descendants, start_time_of, wake_on_children
from trainmaster.worker.ranks import StartError, find_rendezvous, prepared_environment, start_rank
from trainmaster.worker.records import Heartbeat, Journal, RunDirectoryGoneError
from trainmaster.worker.staging import StagingError, stage_node
from trainmaster.worker.tree import TERM_S, Stopping, Tree, engine_signalled
from trainmaster.worker.users import open_own, user_of
from trainmaster.worker.verdict import (
    Evidence,
    Failure,
    ProcessEnd,
    Verdict,
    evidence_from,
    read_tail,
    verdict_of_success,
    verdict_on_failure,
    verdict_on_stop,
)
from trainmaster.worker.watch import ControlWatch, RankWatch

TICK_S = 0.1
STRAY_TERM_S = 2.0
"""Between SIGTERM and SIGKILL for processes that are left when all ranks have ended."""


class _StoppedError(Exception):
    """The attempt was stopped while nothing ran."""


class NodeRun:
    """Runs a node's part of an attempt. It takes over SIGCHLD and all children of this process."""

    def __init__(
        self,
        directory: RunDirectory,
        request: AttemptRequest,
        node: int,
        secrets: Secrets,
        journal: Journal,
        heartbeat: Heartbeat,
        *,
        prepares_only: bool = False,
    ) -> None:
        """`prepares_only`: another worker will run the last step."""
        if not 0 <= node < len(request.nodes):
            raise ValueError(f"the attempt has no node {node}")
        self._directory = directory
        self._request = request
        self._launch = request.launch
        self._node = node
        self._secrets = secrets
        self._journal = journal
        self._heartbeat = heartbeat
        self._prepares_only = prepares_only
        self._beat_due = time.monotonic() + Heartbeat.EVERY_S
        self._home = directory.path / "nodes" / str(node)
        # Programs that lead into containers get no limits: the engine limits the containers.
        leads = any(step.through for step in request.launch.steps)
        memory_mb, cpu_cores = (0, 0) if leads else (request.nodes[node].memory_mb, request.nodes[node].cpu_cores)
        self._cgroup = Cgroup(request.attempt_id, node, memory_mb=memory_mb, cpu_cores=cpu_cores)
        self._memory = MemoryWatch(memory_mb)
        self._tree = Tree(self._cgroup)
        self._control = ControlWatch(directory.path)
        self._control_file = self._home / "rank-control.json"
        self._user = user_of(request.uid, directory.ranks_group(request))
        self._stopping = Stopping(self._tree, journal, self._control_file, uid=request.uid if self._user else None)
        self._selector = selectors.DefaultSelector()
        self._watch = RankWatch(directory, log_cap_bytes=request.log_cap_bytes)
        self._step = request.launch.steps[0]
        self._ends: list[ProcessEnd] = []
        self._leads: dict[int, int] = {}
        """By rank: the descriptor in which a program that leads into a container leaves its answer."""
        self._verdict: Verdict | None = None
        self._deadline: float | None = None
        self._step_deadline: float | None = None
        self._probe: ReadinessProbe | None = None
        self._dump: StackDump | None = None
        self.started_at: float | None = None
        """Unix time at which all ranks were running."""

    def run(self) -> Verdict:
        """Run everything; returns why it ended. Afterwards nothing runs below this process."""
        become_subreaper()
        self._wakeup = wake_on_children(self._selector)
        try:
            return self._run()
        except _StoppedError:
            return replace(self._verdict_on_stop(), step=None)
        except StagingError as error:
            return Verdict(reason=Reason.BAD_INPUT, message=str(error))
        except OSError as error:
            traceback.print_exc()
            reason = Reason.DISK_FULL if error.errno in DISK_FULL_ERRNOS else Reason.STORAGE_UNAVAILABLE
            return Verdict(reason=reason, message=f"the worker failed: {error}")
        except RunDirectoryGoneError:
            raise
        except Exception as error:
            traceback.print_exc()
            evidence = evidence_from(traceback.format_exc().encode(), b"")
            return Verdict(reason=Reason.WORKER_LOST, message=f"the worker failed: {error!r}", evidence=evidence)
        finally:
            self._tree.kill_and_wait()
            self._poll(last=True)
            self._cgroup.remove()

    def _run(self) -> Verdict:
        self._attend()
        self._context = stage_node(
            self._request,
            self._directory,
            self._node,
            self._secrets,
            control_file=self._control_file,
            selector=self._selector,
            user=self._user,
            on_chunk=self._attend,
        )
        self._journal.record("staged")
        first = self._context.first_rank
        *preparing, workload = self._launch.steps
        for step in preparing:
            verdict = self._run_step(step, [first], rendezvous=None)
            if verdict.reason is not Reason.SUCCEEDED:
                return verdict
        if self._prepares_only:
            return verdict
        if not workload.through:
            self._context = replace(self._context, environment=prepared_environment(self._context))
        ranks = range(first, first + self._launch.ranks_per_node)
        meeting = find_rendezvous(self._request, self._directory, self._node, wait=lambda: self._attend(TICK_S))
        return self._run_step(workload, ranks, rendezvous=meeting)

    def _run_step(self, step: LaunchStep, ranks: Sequence[int], rendezvous: tuple[str, int] | None) -> Verdict:
        """Run one step until nothing of it is left."""
        self._attend()
        self._begin(step, ranks)
        self._journal.record("step_started", step=step.name, starts_ranks=not self._prepares)
        pids = {}
        try:
            for rank in ranks:
                pids[rank], lead = start_rank(step, rank, self._context, self._secrets, rendezvous)
                self._tree.add(rank, pids[rank], leads=lead is not None)
                if lead is not None:
                    self._leads[rank] = lead
        except StartError as error:
            self._fail(error.verdict)
        else:
            if not self._prepares:
                self._on_started(pids)
        while self._tree.ranks_running:
            self._turn(TICK_S)
        self._poll()
        self._collect_stacks()
        verdict = self._verdict
        if verdict is None:
            ended = self._stopping.cause is None
            verdict = verdict_of_success(self._ends, step=step.name) if ended else self._verdict_on_stop()
        verdict = self._advised(verdict)
        self._deadline = self._step_deadline = None
        self._end_probe()
        self._clear_strays()
        self._poll(last=True)
        return verdict

    @property
    def _prepares(self) -> bool:
        return self._step is not self._launch.steps[-1]

    def _begin(self, step: LaunchStep, ranks: Sequence[int]) -> None:
        self._step = step
        self._step_deadline = None if step.timeout_s is None else time.monotonic() + step.timeout_s
        self._ends = []
        self._watch.failures.clear()  # of a step that went on, and ended well
        self._cgroup.count_anew()
        self._tree.calm_down()
        logs = [log_stream(self._node, step.name, rank, channel) for rank in ranks for channel in ("out", "err")]
        if self._user is not None:
            # The directory is ours: the ranks cannot create files in it.
            for stream in (name(rank) for rank in ranks for name in (self._context.events, self._context.metrics)):
                os.close(open_own(stream, self._user))
        self._watch.follow(logs, {rank: self._context.events(rank) for rank in ranks})

    def _on_started(self, pids: dict[int, int]) -> None:
        now = time.monotonic()
        self.started_at = time.time()
        ranks = [{"rank": rank, "pid": pid, "start_time": start_time_of(pid)} for rank, pid in pids.items()]
        self._journal.record("started", ranks=ranks, reports_phases=self._launch.reports_phases)
        self._hint()
        if self._request.max_runtime_s is not None:
            self._deadline = now + self._request.max_runtime_s
        if self._context.port is None:
            return
        readiness = self._launch.readiness or Readiness()
        if self._node and readiness.first_node_only:
            self._journal.record("ready")
            return
        host, uid = self._request.nodes[self._node].address, self._user.uid if self._user else None
        self._probe = ReadinessProbe(self._selector, host, self._context.port, readiness, now, uid=uid)

    def _turn(self, wait_s: float) -> None:
        """Wait for an event, but not longer than `wait_s`, and do everything that is due."""
        now = time.monotonic()
        probe_due = self._probe.next_due if self._probe else None
        moments = [now + wait_s, self._tree.next_due(), self._watch.next_due, probe_due]
        due = min(moment for moment in moments if moment is not None)
        for key, _ in self._selector.select(max(0.0, due - now)):
            key.data()
        now = time.monotonic()
        for end in self._tree.reap():
            self._on_end(end)
        beats = now >= self._beat_due
        if beats:
            self._beat_due = now + Heartbeat.EVERY_S
            self._heartbeat.beat()
            self._journal.flush()
        control = self._control.poll(closely=beats)
        # Before the control is acted on: a rank that offered to save before must get the chance.
        self._poll()
        if control is not None:
            self._on_control(control, now)
        self._check_times(now)
        self._check_memory(now)
        self._tree.advance(now)
        self._stopping.notice_missed_grace()

    def _attend(self, wait_s: float = 0.0) -> None:
        """A turn in which nothing runs yet: a stop ends everything."""
        self._turn(wait_s)
        if self._stopping.cause is not None:
            raise _StoppedError

    def _poll(self, *, last: bool = False) -> None:
        if self._watch.poll(last=last):
            self._hint()

    def _check_times(self, now: float) -> None:
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            if self._stopping.cause is None:
                self._on_control(Control(seq=0, stop=StopCause.TIMEOUT, save=True, grace_s=self._launch.grace_s), now)
        if self._step_deadline is not None and now >= self._step_deadline:
            self._step_deadline = None
            if self._stopping.cause is None:
                message = f"step {self._step.name} took longer than {self._step.timeout_s:g} s, and was ended"
                # What it waited for may answer the next time.
                self._fail_step(Reason.STORAGE_UNAVAILABLE, message)
        self._check_service(now)
        if self._dump is not None and now >= self._dump.due:
            self._collect_stacks()

    def _check_memory(self, now: float) -> None:
        ends = self._verdict is not None or self._stopping.cause is not None
        if self._cgroup.memory_limit_mb is None and self._tree.ranks_running and not ends:
            message = self._memory.excess(now, lambda: (process.pid for process in descendants(os.getpid())))
            if message is not None:
                self._fail_step(Reason.OUT_OF_MEMORY, message)
                self._tree.bring_down(now, term_after_s=0, kill_after_s=0)

    def _check_service(self, now: float) -> None:
        if self._probe is None:
            return
        self._probe.advance(now)
        if self._probe.is_ready:
            host, port = self._probe.address
            endpoint = {"host": host, "port": port, "ready_at": time.time()}
            self._directory.put_document(endpoint_document(self._node), endpoint)
            self._journal.record("ready", host=host, port=port)
            self._end_probe()
            self._hint()
        elif (message := self._probe.failure(now)) is not None and self._stopping.cause is None:
            self._end_probe()
            self._fail_step(Reason.NOT_READY, message)

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _on_control(self, control: Control, now: float) -> None:
        if control.dump_stacks and self._dump is None and self._tree.ranks_running:
            ranks = self._tree.rank_pids()
            logs = {rank: self._context.log(self._step.name, rank, "err") for rank in ranks}
            self._dump = StackDump(ranks, self._watch.dump_stacks, logs, now)
        if self._verdict is None:
            said = self._watch.can_save if self._launch.can_save is None else self._launch.can_save
            self._stopping.take(control, can_save=said and not self._prepares, now=now)

    def _collect_stacks(self) -> None:
        if self._dump is not None:
            self._journal.record("stacks", stacks=self._dump.collect())
            self._dump = None
            self._hint()

    def _on_end(self, end: ProcessEnd) -> None:
        self._ends.append(end)
        if not self._prepares:
            self._journal.record("rank_exited", rank=end.rank, exit_code=end.exit_code, signal=end.signal)
        said_by_lead = take_answer(self._leads.pop(end.rank)) if end.rank in self._leads else None
        if self._request.engine_needs is not None and self._stopping.cause is None and self._obeyed_engine(end):
            stop = Control(seq=0, stop=StopCause.ENGINE, save=True, grace_s=self._launch.grace_s)
            self._on_control(stop, time.monotonic())
        if end.failed and self._verdict is None and self._stopping.cause is None:
            # The rank's last event decides, and may not have been read yet.
            self._poll()
            verdict = verdict_on_failure(
                end,
                answer=Failure.of_lead(said_by_lead) if said_by_lead else None,
                # If another rank gave a reason, this one failed because of that one.
                said=self._watch.failures.get(end.rank) or next(iter(self._watch.failures.values()), None),
                step=self._step.name,
                prepares=self._prepares,
                evidence=self._evidence(end.rank),
                retry_exit_codes=self._launch.retry_exit_codes,
                oom_kills=self._cgroup.oom_kills(),
                memory_limit_mb=self._cgroup.memory_limit_mb,
                disk_is_full=disk_is_full(self._directory.path),
            )
            self._fail(verdict)

    def _obeyed_engine(self, end: ProcessEnd) -> bool:
        """Whether a rank ended because the engine sent SIGTERM to the processes of the node."""
        self._poll()  # it may just have reported that it has finished
        if not end.failed and (self._prepares or self._tree.ranks_running or self._watch.has_finished):
            return False
        return end.exit_code == EXIT_STOPPED or engine_signalled(end)

    def _fail(self, verdict: Verdict) -> None:
        """The first failure is the cause; the remaining ranks are brought down."""
        if self._verdict is None:
            self._verdict = verdict
        self._tree.bring_down(time.monotonic(), term_after_s=0, kill_after_s=TERM_S)

    def _fail_step(self, reason: Reason, message: str) -> None:
        evidence = self._evidence(self._context.first_rank)
        self._fail(Verdict(reason=reason, message=message, step=self._step.name, evidence=evidence))

    def _clear_strays(self) -> None:
        self._tree.reap()
        if self._tree.is_empty:
            return
        if count := len(descendants(os.getpid())):
            self._journal.record("strays_killed", count=count)
        self._tree.bring_down(time.monotonic(), term_after_s=0, kill_after_s=STRAY_TERM_S)
        while not self._tree.is_empty:
            self._turn(TICK_S)

    def _advised(self, verdict: Verdict) -> Verdict:
        """Add advice for a process that looked for fetched data in a directory that could not be made."""
        if verdict.end is None or not verdict.end.failed:
            return verdict
        advice = self._context.workspace.advice("\n".join((verdict.evidence.error or "", *verdict.evidence.last_lines)))
        return replace(verdict, message=f"{verdict.message}; {advice}") if advice else verdict

    def _verdict_on_stop(self) -> Verdict:
        cause = self._stopping.cause
        assert cause is not None
        # A preparing step that succeeded has not done the job's work.
        ends = [] if self._prepares else self._ends
        verdict = verdict_on_stop(
            cause, ends, step=self._step.name, signalled=self._tree.terminated, finished=self._watch.has_finished
        )
        if verdict.stop_cause is StopCause.TIMEOUT and self._request.max_runtime_s is not None:
            return replace(verdict, message=f"stopped: it ran longer than {self._request.max_runtime_s:g} s")
        if verdict.stop_cause is StopCause.PEER:
            for peer in range(len(self._request.nodes)):
                ended = self._directory.document(exit_document(peer)) if peer != self._node else None
                if ended is not None:
                    return replace(verdict, message=f"stopped: node {peer} ended first: {ended.get('message')}")
        return verdict

    def _evidence(self, rank: int) -> Evidence:
        err, out = (read_tail(self._context.log(self._step.name, rank, channel)) for channel in ("err", "out"))
        return evidence_from(err, out)

    def _hint(self) -> None:
        send_hint(self._request.hint_socket, self._request.attempt_id)
