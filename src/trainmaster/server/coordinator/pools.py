"""The threads that act for attempts: pools apart for launches and for slow acts of each backend.

Nobody has to wait for these threads when the process ends: an act that hangs ends with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

CLOSE_S = 3.0
"""A server that ends waits so long for acts that an engine holds up."""
_WORKERS = 4


@dataclass(frozen=True, slots=True)
class Act:
    """One action for an attempt."""

    work: Callable[[], None]
    slow: bool = False
    """May wait for processes to end, or for an engine that has to end them; must hold up neither launches nor other
    backends."""
    launches: bool = False
    """Asks its backend for something that an engine may be slow to do; must not hold up other backends, or stops."""


class Pool(Executor):
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
        self._quick = pool or Pool("act")
        self._tidying = pool or Pool("tidy")
        self._slow = {name: pool or Pool(f"sweep {name}") for name in names}
        self._launching = {name: pool or Pool(f"launch {name}") for name in names}

    def for_act(self, act: Act, backend: str) -> Executor:
        if act.launches:
            return self._launching[backend]
        return self._slow[backend] if act.slow else self._quick

    def tidy(self, work: Callable[[], None]) -> None:
        """Run something that nobody waits for."""
        self._tidying.submit(work)

    def close(self) -> None:
        """Finish quick actions and launches that have begun, unless that takes too long; drop the rest."""
        for pool in (self._tidying, *self._slow.values()):
            pool.shutdown(wait=False, cancel_futures=True)
        _close_pools([self._quick, *self._launching.values()], within_s=CLOSE_S)


def _close_pools(pools: Sequence[Executor], *, within_s: float) -> None:
    for pool in pools:
        pool.shutdown(wait=False, cancel_futures=True)
    deadline = time.monotonic() + within_s
    for pool in pools:
        if isinstance(pool, Pool):
            pool.join(max(0.0, deadline - time.monotonic()))
