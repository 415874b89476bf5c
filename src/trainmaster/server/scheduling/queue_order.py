"""Who is next in a pass: queues by their fair share, the jobs of a queue in order."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from trainmaster.server.core.resources import JobQueue
from trainmaster.server.core.states import Desired
from trainmaster.server.scheduling.placement import Amounts
from trainmaster.server.scheduling.pool import Demand, Pool
from trainmaster.server.scheduling.view import ClusterView, Entry, Key

_LEAST_WEIGHT = 1e-9


@dataclass(slots=True, eq=False)
class QueueState:
    weight: float
    quota_gpus: int | None
    held_gpus: int = 0
    closed: Key | None = None
    """Where the first job stands that its quota does not admit: from there on its GPU jobs wait."""

    def close(self, key: Key) -> None:
        """Record that a job at this place is over the quota."""
        self.closed = key if self.closed is None else min(key, self.closed)

    def is_closed(self, key: Key) -> bool:
        """Whether GPU jobs at this place wait for a job before them."""
        return self.closed is not None and self.closed < key

    def admits(self, gpus: int) -> bool:
        return self.quota_gpus is None or gpus <= self.quota_gpus or not gpus

    def over(self, gpus: int) -> int:
        """By how much `gpus` more would exceed the quota."""
        return 0 if self.quota_gpus is None or not gpus else max(0, self.held_gpus + gpus - self.quota_gpus)


@dataclass(slots=True, eq=False)
class DemandState:
    """Jobs with the same needs on one backend, and what this pass knows of them."""

    demand: Demand
    number: int
    groups: list[GroupState] = field(default_factory=list)
    blocked: bool = False
    failed: list[frozenset[str]] = field(default_factory=list)
    """Heads behind which it found no place; it finds none behind those and others either."""
    hopeless: list[tuple[int, frozenset[str]]] = field(default_factory=list)
    """Priorities for which no victims were found, behind these heads; for lower ones there are none either."""
    _order: list[tuple[Key, int]] = field(default_factory=list)

    def first(self) -> Entry | None:
        """The first job that waits, among those that their quota admits."""
        order = self._order
        while order:
            key, index = order[0]
            group = self.groups[index]
            entry = group.first()
            gpus = self.demand.total_gpus
            if entry is None or (gpus and (group.queue.is_closed(entry[:3]) or group.queue.over(gpus))):
                heappop(order)
            elif entry[:3] != key:
                heapreplace(order, (entry[:3], index))
            else:
                return entry
        return None

    def order(self) -> None:
        self._order = [
            (entry[:3], index) for index, group in enumerate(self.groups) if (entry := group.first()) is not None
        ]
        heapify(self._order)


class GroupState:
    __slots__ = ("_at", "_done", "_entries", "_now", "_skipped", "_skipped_at", "asked", "queue")

    def __init__(self, entries: list[Entry], asked: DemandState, queue: QueueState, now: float) -> None:
        self.asked = asked
        self.queue = queue
        self._entries = entries
        self._now = now
        self._at = 0
        self._skipped: Entry | None = None
        self._skipped_at = 0
        self._done: set[int] = set()
        """Those after the skipped one that have been dealt with."""
        if entries[0][0] < math.inf:
            # Those that room is made for are dealt with before all others.
            self._at = bisect_left(entries, (math.inf,))

    def next(self) -> Entry | None:
        """The next job that may run now; jobs in back-off are skipped."""
        entries, now = self._entries, self._now
        for at in range(self._at, len(entries)):
            job = entries[at][3]
            if not job.in_backoff(now) and job.desired is Desired.RUN and at not in self._done:
                self._at = at
                return entries[at]
        self._at = len(entries)
        return None

    def first(self) -> Entry | None:
        """The first job that waits, even if it was tried already."""
        return self._skipped or self.next()

    def advance(self) -> None:
        """Record that the next job was placed, or that room is being made for it."""
        if self._skipped is not None:
            self._done.add(self._at)
        self._at += 1

    def skip(self, *, until: float) -> None:
        """Skip the next job, and all that do not end by then."""
        if self._skipped is None:
            self._skipped, self._skipped_at = self._entries[self._at], self._at
        for at in range(self._at + 1, len(self._entries) if math.isfinite(until) else 0):
            job = self._entries[at][3]
            if job.max_runtime_s is not None and not job.is_service and self._now + job.max_runtime_s <= until:
                self._at = at
                return
        self._at = len(self._entries)

    def rewind(self) -> None:
        if self._skipped is not None:
            self._skipped, self._at = None, self._skipped_at


class LineState:
    """The jobs of a queue on a backend."""

    def __init__(self, queue: QueueState, used: Amounts, total: Amounts) -> None:
        self.queue = queue
        self.used = used
        self._total = total
        self._order: list[tuple[Key, int]] = []
        self._groups: list[GroupState] = []

    def place(self) -> tuple[float, Key] | None:
        """The place of its next job among all queues: the lowest share first, then the earliest job."""
        if not self._order:
            return None
        return self.used.share_of(self._total) / max(self.queue.weight, _LEAST_WEIGHT), self._order[0][0]

    def pop(self) -> GroupState:
        return self._groups[heappop(self._order)[1]]

    def push(self, group: GroupState) -> None:
        if (entry := group.next()) is not None:
            heappush(self._order, (entry[:3], len(self._groups)))
            self._groups.append(group)


class Lines:
    def __init__(self, view: ClusterView, pool: Pool, now: float) -> None:
        self.asked: list[DemandState] = []
        self.lines: dict[tuple[str, str], LineState] = {}
        self.room: list[tuple[Entry, DemandState]] = []
        """Those that room is made for, in order."""
        self.queues: dict[str, QueueState] = {}
        known: dict[tuple[str, object], DemandState] = {}
        for (name, _), used in view.occupancy.usage.items():
            self._queue(view, name).held_gpus += used.gpus
        for line, groups in view.waiting.items():
            name, backend = line
            queue = self._queue(view, name)
            total = view.inventory.totals.get(backend, Amounts())
            state = self.lines[line] = LineState(queue, view.occupancy.usage.get(line, Amounts()), total)
            for group, entries in groups.items():
                if (asked := known.get((backend, group.needs))) is None:
                    asked = DemandState(pool.demand(backend, group.needs), len(self.asked))
                    known[backend, group.needs] = asked
                    self.asked.append(asked)
                for entry in entries:
                    if entry[0] == math.inf:
                        break
                    self.room.append((entry, asked))
                each = GroupState(list(entries) if not isinstance(entries, list) else entries, asked, queue, now)
                if asked.demand.possible and queue.admits(asked.demand.total_gpus):
                    asked.groups.append(each)
                    state.push(each)
                    if queue.over(asked.demand.total_gpus) and (first := each.next()) is not None:
                        queue.close(first[:3])
        for asked in self.asked:
            asked.order()
        self.room.sort(key=lambda each: each[0][:3])

    def _queue(self, view: ClusterView, name: str) -> QueueState:
        if name not in self.queues:
            queue = view.queues.get(name, JobQueue(name=name))
            self.queues[name] = QueueState(queue.weight, queue.quota_gpus)
        return self.queues[name]
