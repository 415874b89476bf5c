"""How the server's wishes reach the ranks, and how they are stopped when they are asked to."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from trainmaster.protocol.documents import write_document
from trainmaster.protocol.reasons import StopCause
from trainmaster.protocol.request import Control
from trainmaster.worker.records import Journal
from trainmaster.worker.tree import Tree

TERM_S = 5.0
"""Between SIGTERM and SIGKILL for ranks that had their time already, or whose peers failed."""


class Stopping:
    """Passes wishes on. Once a stop was asked for, it is never taken back; a later one may be more urgent."""

    def __init__(self, tree: Tree, journal: Journal, control_file: Path, *, uid: int | None = None) -> None:
        """Take what to stop, where to write it down, and as whom the ranks read what they are told."""
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
        """Do what is asked. `can_save` says whether those who run now save when they are asked to stop."""
        if control.stop or control.save:
            self._tell_ranks(control)
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
        """Record it, once, when the ranks did not stop in the time they had."""
        forced = self._tree.terminated if self._saving else self._tree.killed
        if self.cause is None or self._missed or not forced or not self._tree.ranks_running or not self._grace_s:
            return
        self._missed = True
        self._journal.record("grace_missed", cause=self.cause, grace_s=self._grace_s)

    def _tell_ranks(self, control: Control) -> None:
        self._seq += 1
        # On a full disk they learn it from SIGTERM alone.
        with contextlib.suppress(OSError):
            write_document(self._control_file, replace(control, seq=self._seq).to_json(), uid=self._uid)
