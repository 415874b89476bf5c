"""The processes below a worker: which are ranks, how they end, and how all of them are brought down."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from trainmaster.protocol.documents import write_document
from trainmaster.protocol.environment import ENGINE_SIGNALS_RANKS
from trainmaster.protocol.processes import KILL_LED
from trainmaster.protocol.reasons import StopCause
from trainmaster.protocol.request import Control
from trainmaster.worker.cgroups import Cgroup
from trainmaster.worker.processes import descendants, seen, signal_all
from trainmaster.worker.records import Journal
from trainmaster.worker.verdict import ProcessEnd

_ADOPT_AFTER_S = 0.05
"""Moving a process into a cgroup can take 20 ms: not on the path of a start, nor for jobs that end at once."""
_ADOPT_PASSES = 3
_KILL_EVERY_S = 0.02
_LEADS_S = 10.0
"""How long programs that lead into containers have to kill these, before they are killed themselves."""


class Tree:
    def __init__(self, cgroup: Cgroup) -> None:
        self._cgroup = cgroup
        self._ranks: dict[int, int] = {}
        self._leads: set[int] = set()
        self._has_children = False
        self._adopt_at: float | None = None
        self._term_at: float | None = None
        self._kill_at: float | None = None
        self._next_kill: float | None = None
        self._killing_from: float | None = None
        self.terminated = False
        self.killed = False

    @property
    def ranks_running(self) -> bool:
        return bool(self._ranks)

    @property
    def is_empty(self) -> bool:
        """As of the last `reap`."""
        return not self._has_children

    def rank_pids(self) -> dict[int, int]:
        return {rank: pid for pid, rank in self._ranks.items()}

    def add(self, rank: int, pid: int, *, leads: bool = False) -> None:
        """Count a new process as this rank. One that `leads` into a container goes with it; the engine limits it."""
        self._ranks[pid] = rank
        self._has_children = True
        if leads:
            self._leads.add(pid)
        elif self._adopt_at is None:
            # Memory that a process takes before it is moved is not counted: with a limit, move it in the next turn.
            self._adopt_at = time.monotonic() + (0 if self._cgroup.has_limits else _ADOPT_AFTER_S)

    def reap(self) -> list[ProcessEnd]:
        """Reap all that ended; returns the ends of ranks, in order."""
        ends: list[ProcessEnd] = []
        try:
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                pid, status = ended
                self._leads.discard(pid)
                if (rank := self._ranks.pop(pid, None)) is not None:
                    ends.append(_end(rank, status))
        except ChildProcessError:
            self._has_children = False
        return ends

    def bring_down(self, now: float, *, term_after_s: float, kill_after_s: float) -> None:
        """End everything: SIGTERM after a while, SIGKILL after another. A second call can only hasten it."""
        term_at, kill_at = now + term_after_s, now + kill_after_s
        self._term_at = term_at if self._term_at is None else min(self._term_at, term_at)
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        self.advance(now)

    def advance(self, now: float) -> None:
        if self._adopt_at is not None and now >= self._adopt_at:
            self._adopt_at = None
            self._adopt_all()
        if self._term_at is not None and not self.terminated and now >= self._term_at:
            self.terminated = True
            below = descendants(os.getpid())
            signal_all(below, signal.SIGTERM)
            signal_all(below, signal.SIGCONT)
        if self._kill_at is not None and now >= max(self._kill_at, self._next_kill or 0.0):
            # Repeatedly: children of a killed process become ours, and some fork faster than we look.
            self._next_kill = now + _KILL_EVERY_S
            self._kill_all(now)

    def next_due(self) -> float | None:
        moments = [self._adopt_at, self._next_kill or self._kill_at]
        if not self.terminated:
            moments.append(self._term_at)
        return min((moment for moment in moments if moment is not None), default=None)

    def calm_down(self) -> None:
        """Forget a completed take-down, before another step starts."""
        self._adopt_at = self._term_at = self._kill_at = self._next_kill = self._killing_from = None
        self.terminated = self.killed = False

    def kill_and_wait(self) -> None:
        while self.reap() or not self.is_empty:
            self._kill_all(time.monotonic())
            time.sleep(_KILL_EVERY_S)

    def _kill_all(self, now: float) -> None:
        self.killed = True
        if self._killing_from is None:
            self._killing_from = now
            signal_all(filter(None, map(seen, self._leads)), KILL_LED)
        spared = self._leads if now < self._killing_from + _LEADS_S else set()
        signal_all((process for process in descendants(os.getpid()) if process.pid not in spared), signal.SIGKILL)

    def _adopt_all(self) -> None:
        adopted: set[int] = set()
        # What they start after the move is in the group already; what they started before is found in the next pass.
        for _ in range(_ADOPT_PASSES):
            new = {process.pid for process in descendants(os.getpid())} - adopted
            if not new:
                return
            self._cgroup.adopt(new)
            adopted |= new


def _end(rank: int, status: int) -> ProcessEnd:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return ProcessEnd(rank=rank, exit_code=code)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return ProcessEnd(rank=rank, signal=name)


_SIGNALLED_S = 0.5
"""How long a worker waits for an engine's signal that reaches it after its ranks: 60 ms on a very busy node."""


def engine_signalled(end: ProcessEnd) -> bool:
    """Whether the engine's SIGTERM, which workers on a cluster block, came before the end of a rank or right after it.

    Also after one with exit code 0: many programs exit so when they, or a process that they wait for, are terminated.
    """
    may_follow = end.failed or ENGINE_SIGNALS_RANKS in os.environ
    return bool(signal.sigtimedwait({signal.SIGTERM}, _SIGNALLED_S if may_follow else 0))


TERM_S = 5.0
"""Between SIGTERM and SIGKILL for ranks that had their time already, or whose peers failed."""


class Stopping:
    """Passes the server's requests on to the ranks. A stop is never taken back; a later one may be more urgent."""

    def __init__(self, tree: Tree, journal: Journal, control_file: Path, *, uid: int | None = None) -> None:
        """`uid`: the user that the ranks read the control file as."""
        self._tree = tree
        self._journal = journal
        self._control_file = control_file
        self._uid = uid
        self._seq = 0
        self._saving = False
        self._grace_s = 0.0
        self._missed = False
        self.cause: StopCause | None = None
        """Why the ranks are being stopped; None while they are not."""

    def take(self, control: Control, *, can_save: bool, now: float) -> None:
        """`can_save`: whether the running processes save when asked to stop."""
        if control.stop or control.save:
            self._seq += 1
            # On a full disk, SIGTERM alone tells them.
            with contextlib.suppress(OSError):
                write_document(self._control_file, replace(control, seq=self._seq).to_json(), uid=self._uid)
        if control.stop is None:
            return
        saving = control.save and can_save
        if (control.stop, saving) != (self.cause, self._saving):
            self._journal.record("stopping", cause=control.stop, save=saving, grace_s=control.grace_s)
        self.cause, self._saving, self._grace_s = control.stop, saving, control.grace_s
        if saving:
            self._tree.bring_down(now, term_after_s=control.grace_s, kill_after_s=control.grace_s + TERM_S)
        else:
            self._tree.bring_down(now, term_after_s=0, kill_after_s=control.grace_s)

    def notice_missed_grace(self) -> None:
        """Record, once, that the ranks did not stop in time."""
        forced = self._tree.terminated if self._saving else self._tree.killed
        if self.cause is None or self._missed or not forced or not self._tree.ranks_running or not self._grace_s:
            return
        self._missed = True
        self._journal.record("grace_missed", cause=self.cause, grace_s=self._grace_s)
