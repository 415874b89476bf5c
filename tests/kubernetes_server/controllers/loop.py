"""A controller: a queue of keys, each of which is brought into order by one call."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kubernetes_server.objects import Key
from kubernetes_server.statuses import StatusError
from kubernetes_server.store import Change

if TYPE_CHECKING:
    from kubernetes_server.cluster import Cluster

log = logging.getLogger(__name__)


class Controller:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.store = cluster.store
        self.operations = cluster.operations
        self._queue: dict[Key, None] = {}
        self._wake = asyncio.Event()
        self._soon: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def sync(self, key: Key) -> None:
        """Bring one object into order."""
        raise NotImplementedError

    def enqueue(self, key: Key) -> None:
        self._queue[key] = None
        self._wake.set()

    def enqueue_after(self, key: Key, seconds: float) -> None:
        if timer := self._timers.pop(key, None):
            timer.cancel()
        loop = asyncio.get_running_loop()
        self._timers[key] = loop.call_later(max(seconds, 0), self.enqueue, key)

    def enqueue_soon(self, key: Key, seconds: float) -> None:
        """Later, but together with what else is enqueued in this way until then."""
        if key not in self._soon:
            loop = asyncio.get_running_loop()
            self._soon.add(key)
            loop.call_later(seconds, self._enqueue_collected, key)

    def _enqueue_collected(self, key: Key) -> None:
        self._soon.discard(key)
        self.enqueue(key)

    def enqueue_change(self, change: Change) -> None:
        self.enqueue(change.record.key)

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                key = next(iter(self._queue))
                del self._queue[key]
                try:
                    self.sync(key)
                except StatusError as error:
                    # As every controller does: try again.
                    log.info("%s %s: %s", type(self).__name__, key, error)
                    self.enqueue_after(key, 0.2)
                except Exception:
                    log.exception("%s %s", type(self).__name__, key)
                await asyncio.sleep(0)
