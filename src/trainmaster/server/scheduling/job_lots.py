"""The queued jobs in order, in lots of jobs with the same needs, so that a pass can skip a whole lot at once."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from typing import NamedTuple

from trainmaster.server.core.job import Job
from trainmaster.server.core.resources import Needs

Line = tuple[str, str]
"""A queue and a backend."""
BULK = 64
"""With more changes than this a lot is sorted anew; with fewer each is put in its place."""


class Lot(NamedTuple):
    """What the jobs of a lot have in common, besides their line."""

    needs: Needs
    priority: int


Key = tuple[float, float, str]
"""The place of a job among those that wait: those that room is being made for come first, then by `order_key`."""
Entry = tuple[float, float, str, Job]
"""A key and its job."""


def key_of(job: Job) -> Key:
    """The place of a job among those that wait."""
    return (math.inf if job.room_at is None else job.room_at, job.order_key, job.job_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJobs:
    """The queued jobs; each lot is sorted by key."""

    lines: Mapping[Line, Mapping[Lot, Sequence[Entry]]] = field(default_factory=dict)

    def changed(self, gone: Iterable[Job], come: Iterable[Job]) -> WaitingJobs:
        """The same without some jobs, as they were, and with others."""
        changes: dict[tuple[Line, Lot], tuple[list[Key], list[Entry]]] = {}
        for job in gone:
            changes.setdefault(_home(job), ([], []))[0].append(key_of(job))
        for job in come:
            changes.setdefault(_home(job), ([], []))[1].append((*key_of(job), job))
        if not changes:
            return self
        lines: dict[Line, Mapping[Lot, Sequence[Entry]]] = dict(self.lines)
        fresh: dict[Line, dict[Lot, Sequence[Entry]]] = {}
        for (line, lot), (removed, added) in changes.items():
            lots = fresh.get(line)
            if lots is None:
                lots = fresh[line] = dict(lines.get(line, {}))
                lines[line] = lots
            entries = _edited(lots.get(lot, ()), removed, added)
            if entries:
                lots[lot] = entries
            else:
                lots.pop(lot, None)
                if not lots:
                    del lines[line], fresh[line]
        return WaitingJobs(lines=lines)

    def in_order(self) -> list[Job]:
        """Everybody, first come first."""
        return [entry[3] for entry in merge(*(lot for lots in self.lines.values() for lot in lots.values()))]


def _home(job: Job) -> tuple[Line, Lot]:
    return (job.queue, job.host_backend), Lot(job.needs, job.priority)


def _edited(entries: Sequence[Entry], removed: list[Key], added: list[Entry]) -> list[Entry]:
    edited = list(entries)
    if len(removed) + len(added) > BULK:
        out = set(removed)
        edited = [entry for entry in edited if entry[:3] not in out] if out else edited
        edited += added
        edited.sort()
        return edited
    for key in removed:
        # A key sorts just before its entry.
        del edited[bisect_left(edited, key)]
    for entry in added:
        insort(edited, entry)
    return edited
