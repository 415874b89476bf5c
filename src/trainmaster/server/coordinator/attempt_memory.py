"""What a leader remembers of an attempt that it acts on. It only saves repeating actions on every pass."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.backends.base import Change, LaunchError, NotYetError
from trainmaster.protocol.request import AttemptRequest, Control
from trainmaster.server.core.job import Attempt, Job

STOP_OVERDUE_S = 45.0
"""Past the grace period: a worker that has not even reported a missed grace period by then is stuck."""
BACKOFF_S = 1.0
BACKOFF_MAX_S = 30.0


@dataclass(slots=True)
class LaunchWait:
    """What a NotYetError said, without the frames that it was raised in: of thousands, each would keep a view alive."""

    message: str
    until: Change
    again_in_s: float
    is_over: bool = False


@dataclass(slots=True)
class AttemptMemory:
    """What this process did for one attempt."""

    request: AttemptRequest | None = None
    launched_at: float | None = None
    revoked: bool = False
    killed: bool = False
    control: Control | None = None
    lost: frozenset[int] = frozenset()
    """Nodes whose worker died without an exit document; the processes that it left are to be swept."""
    swept: frozenset[int] = frozenset()
    busy: bool = False
    failures: int = 0
    """Actions that failed in a row, for the back-off."""
    not_before: float = 0.0
    wait: LaunchWait | None = None
    """What the backend prepares before it can launch the attempt."""
    wait_told_at: float = float("-inf")
    claim_awaited_from: float | None = None
    """The first launch by this process, or the last time that the backend was not ready for it."""
    stop_seen_at: float | None = None
    """When a stop was first seen that is dated after now, because the clock was set back."""
    refusal: LaunchError | None = None
    """Why a launch failed that left nothing running."""
    handle: str | None = None

    def restart_waits(self) -> None:
        """Wait from now on: the remembered times are by a clock that was set back."""
        self.not_before = 0.0
        self.wait_told_at = float("-inf")
        self.launched_at = self.claim_awaited_from = self.stop_seen_at = None

    def has_to_wait(self, wait: NotYetError) -> bool:
        """Take in what a backend waits for; returns whether that is something new."""
        is_new = self.wait is None or self.wait.until is not wait.until
        self.wait = LaunchWait(str(wait), wait.until, wait.again_in_s)
        if not is_new and wait.until.done():
            self.wait.is_over = True  # It may have told the wait before this one.
        self.handle = wait.handle or self.handle
        self.request = None  # It is on disk, and many may wait for long.
        return is_new

    def failed(self, now: float) -> float:
        """An action failed, and is repeated after the returned seconds."""
        wait_s: float = min(BACKOFF_S * 2 ** min(self.failures, 10), BACKOFF_MAX_S)
        self.failures += 1
        self.not_before = now + wait_s
        self.control = None
        self.revoked = self.killed = False
        return wait_s

    def is_quiet(self, job: Job, now: float) -> bool:
        """Whether the attempt waits for its backend, has said why, and nobody wants anything else of it."""
        attempt = job.live
        if (wait := self.wait) is None or self.launched_at is None:
            return False
        return (
            not (self.busy or wait.is_over or attempt.claimed)
            and attempt.stop is None
            and self.handle == attempt.handle
            and self.refusal is None
            and 0 <= now - self.launched_at < wait.again_in_s
            and job.message == wait.message
        )

    def stop_is_overdue(self, attempt: Attempt, now: float) -> bool:
        if (asked_at := attempt.stop_at) is not None and asked_at > now:
            asked_at = self.stop_seen_at = now if self.stop_seen_at is None else self.stop_seen_at
        return asked_at is not None and now > asked_at + attempt.stop_grace_s + STOP_OVERDUE_S
