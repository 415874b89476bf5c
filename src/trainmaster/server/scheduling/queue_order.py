"""Who is next in a pass: queues by their fair share, the jobs of a queue in order."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Queue
from trainmaster.server.core.states import Desired
from trainmaster.server.scheduling.placement import Amounts
from trainmaster.server.scheduling.pool import Pool, Wish
from trainmaster.server.scheduling.view import ClusterView, Entry, Key

_LEAST_WEIGHT = 1e-9


@dataclass(slots=True, eq=False)
class QueueState:
    """A queue as a pass goes on."""

    weight: float
    quota_gpus: int | None
    held_gpus: int = 0
    closed: Key | None = None
    """Where the first job stands that its quota does not admit: from there on its GPU jobs wait."""

    def close(self, key: Key) -> None:
        """A job at this place is over the quota."""
        self.closed = key if self.closed is None else min(key, self.closed)

    def is_closed(self, key: Key) -> bool:
        """Whether GPU jobs at this place wait for one before them."""
        return self.closed is not None and self.closed < key

    def admits(self, gpus: int) -> bool:
        """Whether it could ever hold so many GPUs."""
        return self.quota_gpus is None or gpus <= self.quota_gpus or not gpus

    def over(self, gpus: int) -> int:
        """How far beyond its quota so many GPUs more would be."""
        return 0 if self.quota_gpus is None or not gpus else max(0, self.held_gpus + gpus - self.quota_gpus)


@dataclass(slots=True, eq=False)
class Asked:
    """What is asked for, by whom, and what is known of it in this pass."""

    wish: Wish
    number: int
    lots: list[LotState] = field(default_factory=list)
    blocked: bool = False
    """It does not fit what is free."""
    failed: list[frozenset[str]] = field(default_factory=list)
    """Heads behind which it found no place; it finds none behind those and others either."""
    hopeless: list[tuple[int, frozenset[str]]] = field(default_factory=list)
    """Priorities for which no victims were found, behind these heads; for lower ones there are none either."""
    _order: list[tuple[Key, int]] = field(default_factory=list)

    def first(self) -> Entry | None:
        """Who waits first for it, among those that their quota admits."""
        order = self._order
        while order:
            key, index = order[0]
            lot = self.lots[index]
            entry = lot.first()
            gpus = self.wish.total_gpus
            if entry is None or (gpus and (lot.queue.is_closed(entry[:3]) or lot.queue.over(gpus))):
                heappop(order)
            elif entry[:3] != key:
                heapreplace(order, (entry[:3], index))
            else:
                return entry
        return None

    def order(self) -> None:
        """Begin, with all the lots that there are."""
        self._order = [(entry[:3], index) for index, lot in enumerate(self.lots) if (entry := lot.first()) is not None]
        heapify(self._order)


class LotState:
    """A lot as a pass goes on."""

    __slots__ = ("_at", "_done", "_entries", "_now", "_skipped", "_skipped_at", "asked", "queue")

    def __init__(self, entries: list[Entry], asked: Asked, queue: QueueState, now: float) -> None:
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
        """The next job that may run now; those in back-off are passed over."""
        entries, now = self._entries, self._now
        at = self._at
        while at < len(entries):
            entry = entries[at]
            job = entry[3]
            if not job.in_backoff(now) and job.desired is Desired.RUN and at not in self._done:
                self._at = at
                return entry
            at += 1
        self._at = at
        return None

    def first(self) -> Entry | None:
        """The first that waits, even if it was tried already."""
        return self._skipped or self.next()

    def advance(self) -> None:
        """The next one has been dealt with."""
        if self._skipped is not None:
            self._done.add(self._at)
        self._at += 1

    def skip(self, *, until: float) -> None:
        """Pass over the next one, and all that do not end by then."""
        if self._skipped is None:
            self._skipped, self._skipped_at = self._entries[self._at], self._at
        for at in range(self._at + 1, len(self._entries) if math.isfinite(until) else 0):
            job = self._entries[at][3]
            if job.max_runtime_s is not None and not job.is_service and self._now + job.max_runtime_s <= until:
                self._at = at
                return
        self._at = len(self._entries)

    def rewind(self) -> None:
        """Look again at those that were passed over, and at those after them."""
        if self._skipped is not None:
            self._skipped, self._at = None, self._skipped_at


class LineState:
    """The jobs of a queue on a backend, as a pass goes on."""

    def __init__(self, queue: QueueState, used: Amounts, total: Amounts) -> None:
        self.queue = queue
        self.used = used
        self._total = total
        self._order: list[tuple[Key, int]] = []
        self._lots: list[LotState] = []

    def add(self, lot: LotState) -> None:
        """One more lot."""
        entry = lot.next()
        if entry is not None:
            self._order.append((entry[:3], len(self._lots)))
            self._lots.append(lot)

    def start(self) -> None:
        """Begin, with all the lots that there are."""
        heapify(self._order)

    def place(self) -> tuple[float, Key] | None:
        """The place of its next job among all queues: the lowest share first, then who came first."""
        if not self._order:
            return None
        return self.used.share_of(self._total) / max(self.queue.weight, _LEAST_WEIGHT), self._order[0][0]

    def pop(self) -> LotState:
        """The lot of its next job."""
        return self._lots[heappop(self._order)[1]]

    def push(self, lot: LotState) -> None:
        """A lot that has more jobs to look at."""
        entry = lot.next()
        if entry is not None:
            heappush(self._order, (entry[:3], len(self._lots)))
            self._lots.append(lot)


class Lines:
    """Everybody who waits."""

    def __init__(self, view: ClusterView, pool: Pool, now: float) -> None:
        self.asked: list[Asked] = []
        self.lines: dict[tuple[str, str], LineState] = {}
        self.room: list[tuple[Entry, Asked]] = []
        """Those that room is made for, in order."""
        self.queues: dict[str, QueueState] = {}
        known: dict[tuple[str, object], Asked] = {}
        for (name, _), used in view.occupancy.usage.items():
            self._queue(view, name).held_gpus += used.gpus
        for line, lots in view.waiting.lines.items():
            name, backend = line
            queue = self._queue(view, name)
            total = view.inventory.totals.get(backend, Amounts())
            state = self.lines[line] = LineState(queue, view.occupancy.usage.get(line, Amounts()), total)
            for lot, entries in lots.items():
                asked = known.get((backend, lot.needs))
                if asked is None:
                    asked = Asked(pool.wish(backend, lot.needs), len(self.asked))
                    known[backend, lot.needs] = asked
                    self.asked.append(asked)
                for entry in entries:
                    if entry[0] == math.inf:
                        break
                    self.room.append((entry, asked))
                each = LotState(list(entries) if not isinstance(entries, list) else entries, asked, queue, now)
                if asked.wish.possible and queue.admits(asked.wish.total_gpus):
                    asked.lots.append(each)
                    state.add(each)
                    if queue.over(asked.wish.total_gpus) and (first := each.next()) is not None:
                        queue.close(first[:3])
            state.start()
        for asked in self.asked:
            asked.order()
        self.room.sort(key=lambda each: each[0][:3])

    def __iter__(self) -> Iterator[LineState]:
        return iter(self.lines.values())

    def queue_of(self, job: Job) -> QueueState:
        """The queue of a job that waits."""
        return self.queues[job.queue]

    def _queue(self, view: ClusterView, name: str) -> QueueState:
        if name not in self.queues:
            queue = view.queues.get(name, Queue(name=name))
            self.queues[name] = QueueState(queue.weight, queue.quota_gpus)
        return self.queues[name]
