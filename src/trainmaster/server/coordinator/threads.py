"""The coordinator's threads: pools that carry actions out (launches and slow actions of each backend in their own), and
the alarm that wakes the loop. The process does not wait for them when it ends: an action that hangs ends with it."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

_log = logging.getLogger(__name__)

CLOSE_S = 3.0
"""How long a server that ends waits for actions that an engine holds up."""
_WORKERS = 4


@dataclass(frozen=True, slots=True)
class PooledAction:
    work: Callable[[], None]
    slow: bool = False
    """May wait for processes to end, or for an engine; must delay neither launches nor other backends."""
    launches: bool = False
    """May be slow in the engine of its backend; must delay neither other backends nor stops."""


class DaemonPool:
    """Runs calls in a few threads, which start with the first call. One thread submits and closes. The standard
    library's pool waits for its threads when the process ends, however long they take."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name} {number}", daemon=True) for number in range(_WORKERS)
        ]
        self._started = False

    def submit(self, call: Callable[..., object], /, *args: object) -> None:
        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.start()
        self._calls.put(functools.partial(call, *args))

    def close(self) -> None:
        """Drop calls that have not begun, and end the threads after those that have."""
        with contextlib.suppress(Empty):
            while True:
                self._calls.get_nowait()
        for _ in self._threads:
            self._calls.put(None)

    def join(self, deadline: float) -> None:
        """Wait for the calls that have begun, until a time by the monotonic clock."""
        if self._started:
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                _log.exception("a call failed")


class ActionPools:
    """The pools of a coordinator; those of a backend are made when it is first used. A given `pool` replaces all."""

    def __init__(self, pool: Executor | None = None) -> None:
        self._given = pool
        self._quick = pool or DaemonPool("act")
        self._tidying = pool or DaemonPool("tidy")
        self._slow: dict[str, DaemonPool | Executor] = {}
        self._launching: dict[str, DaemonPool | Executor] = {}

    def for_action(self, act: PooledAction, backend: str) -> DaemonPool | Executor:
        if not act.launches and not act.slow:
            return self._quick
        pools, what = (self._launching, "launch") if act.launches else (self._slow, "sweep")
        if backend not in pools:
            pools[backend] = self._given or DaemonPool(f"{what} {backend}")
        return pools[backend]

    def tidy(self, work: Callable[[], None]) -> None:
        """Run something that nobody waits for."""
        self._tidying.submit(work)

    def close(self) -> None:
        """Finish quick actions and launches that have begun, unless that takes too long; drop the rest."""
        awaited = [pool for pool in (self._quick, *self._launching.values()) if isinstance(pool, DaemonPool)]
        others = [pool for pool in (self._tidying, *self._slow.values()) if isinstance(pool, DaemonPool)]
        for pool in (*others, *awaited):
            pool.close()
        deadline = time.monotonic() + CLOSE_S
        for pool in awaited:
            pool.join(deadline)


# When the loop looks again: at once after a hint or another process's write, and every so often by itself.


class LoopWaker:
    """Wakes one loop. Hints may come from any thread; they carry no state and may be lost."""

    def __init__(self, *, foreign_writes: Callable[[], int], poll_s: float, foreign_s: float = 0.2) -> None:
        self._foreign_writes = foreign_writes
        """A number that changes when another process has written to the database."""
        self._poll_s = poll_s
        self._foreign_s = foreign_s
        self._condition = threading.Condition()
        self._hinted: set[str] = set()
        self._rung = False
        self._seen = 0
        self.stopped = False

    def hint(self, subject: str) -> None:
        """Wake the loop; `subject` is an attempt's id, or empty."""
        with self._condition:
            if subject:
                self._hinted.add(subject)
            self._rung = True
            self._condition.notify()

    def stop(self) -> None:
        with self._condition:
            self.stopped = True
            self._condition.notify()

    def wait(self, rest_s: float = 0.0, within_s: float = float("inf")) -> frozenset[str]:
        """Wait for a hint, a write of another process or the next poll; returns the hinted subjects. For the first
        `rest_s` only a hint at an attempt counts. `within_s` is for a poll that is due sooner."""
        deadline = time.monotonic() + min(self._poll_s, within_s)
        with self._condition:
            self._condition.wait_for(lambda: self._hinted or self.stopped, rest_s)
        while True:
            with self._condition:
                if self._rung or self.stopped:
                    break
            # The database may hang: it is asked without the lock, which `hint` takes on the event loop.
            left = deadline - time.monotonic()
            if left <= 0 or self._written_by_others():
                break
            with self._condition:
                self._condition.wait_for(lambda: self._rung or self.stopped, min(left, self._foreign_s))
        with self._condition:
            hinted = frozenset(self._hinted)
            self._hinted.clear()
            self._rung = False
        return hinted

    def rest(self, seconds: float) -> None:
        """Wait, ignoring hints."""
        with self._condition:
            if not self.stopped:
                self._condition.wait_for(lambda: self.stopped, seconds)

    def _written_by_others(self) -> bool:
        number, before = self._foreign_writes(), self._seen
        self._seen = number
        return number != before
