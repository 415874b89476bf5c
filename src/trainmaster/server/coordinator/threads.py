"""The coordinator's threads: pools that carry actions out, and the alarm that wakes the loop.

Launches and slow actions of each backend have pools of their own. The process does not wait for these threads when it
ends: an action that hangs ends with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

CLOSE_S = 3.0
"""How long a server that ends waits for actions that an engine holds up."""
_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Act:
    """One action for an attempt."""

    work: Callable[[], None]
    slow: bool = False
    """May wait for processes to end, or for an engine; must delay neither launches nor other backends."""
    launches: bool = False
    """May be slow in the engine of its backend; must delay neither other backends nor stops."""


class DaemonPool(Executor):
    """Carries calls out in a few threads, which are started when they are needed.

    The standard library's pool waits for its threads when the process ends, however long they take.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._is_shut = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError(f"{self._name} takes nothing more")
            self._calls.put((future, lambda: fn(*args, **kwargs)))
            if not self._idle.acquire(blocking=False) and len(self._threads) < _WORKERS:
                name = f"{self._name} {len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._lock:
            self._is_shut = True
            if cancel_futures:
                self._cancel_all()
            for _ in self._threads:
                self._calls.put(None)
        if wait:
            self.join()

    def join(self, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _cancel_all(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            if call is not None:
                call[0].cancel()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, work = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # whoever asked for it is to know
                    future.set_exception(error)
            del call, future, work
            self._idle.release()


class ActPools:
    """The pools of a coordinator; a given `pool` replaces all of them."""

    def __init__(self, backends: Iterable[str], pool: Executor | None = None) -> None:
        names = tuple(backends)
        self._quick = pool or DaemonPool("act")
        self._tidying = pool or DaemonPool("tidy")
        self._slow = {name: pool or DaemonPool(f"sweep {name}") for name in names}
        self._launching = {name: pool or DaemonPool(f"launch {name}") for name in names}

    def for_act(self, act: Act, backend: str) -> Executor:
        if act.launches:
            return self._launching[backend]
        return self._slow[backend] if act.slow else self._quick

    def tidy(self, work: Callable[[], None]) -> None:
        """Run something that nobody waits for."""
        self._tidying.submit(work)

    def close(self) -> None:
        """Finish quick actions and launches that have begun, unless that takes too long; drop the rest."""
        awaited = (self._quick, *self._launching.values())
        for pool in (self._tidying, *self._slow.values(), *awaited):
            pool.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + CLOSE_S
        for pool in awaited:
            if isinstance(pool, DaemonPool):
                pool.join(max(0.0, deadline - time.monotonic()))


# When the loop looks again: at once after a hint or another process's write, and every so often by itself.


class Alarm:
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

    def wait(self, rest_s: float = 0.0, within_s: float | None = None) -> frozenset[str]:
        """Wait for a hint, a write of another process or the next poll; returns the hinted subjects.

        For the first `rest_s` only a hint at an attempt counts. `within_s` is for a poll that is due sooner.
        """
        deadline = time.monotonic() + (self._poll_s if within_s is None else min(self._poll_s, within_s))
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
