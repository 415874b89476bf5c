"""A thousand small clusters, each another one, under an audit that knows what the scheduler must never do."""

from __future__ import annotations

import random

import pytest
from random_traces import random_trace

from trainmaster.server.core.job import Job
from trainmaster.server.scheduling.schedule import Plan
from trainmaster.server.scheduling.simulation import simulate
from trainmaster.server.scheduling.view import ClusterView
from trainmaster.server.scheduling.virtual_time import Watcher, starts_ahead

SEEDS = 1000
SEEDS_IN_CI = 25
CHUNK = 25


def chunk(first: int) -> object:
    marks = [] if first < SEEDS_IN_CI else [pytest.mark.long]
    return pytest.param(range(first, first + CHUNK), id=f"{first}-{first + CHUNK - 1}", marks=marks)


@pytest.mark.parametrize("seeds", [chunk(first) for first in range(0, SEEDS, CHUNK)])
def test_promises_hold_for_every_seed(seeds: range) -> None:
    for seed in seeds:
        figures = simulate(random_trace(seed), check=True)
        assert sum(figures.ended.values()) == figures.jobs, f"seed {seed}"


class Forks(Watcher):
    """Now and then runs what is there forward twice, with and without backfill: the first in line starts the same."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.compared = 0

    def passed(self, view: ClusterView, plan: Plan, now: float, took_s: float) -> None:
        if not plan.heads or self._chance.random() > 0.1:
            return
        head = min(plan.heads, key=lambda job_id: plan.heads[job_id][0])
        starts = [
            starts_ahead(view, now=now, ends_at=ends_at, wanted=[head], backfill=backfill)[head]
            for backfill in (True, False)
        ]
        assert starts[0] == pytest.approx(starts[1]), f"{head} at {now}"
        self.compared += 1


def ends_at(job: Job) -> float | None:
    return (job.live.started_at or 0.0) + (job.max_runtime_s or 0.0)


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 40), marks=pytest.mark.long)])
def test_first_in_line_starts_at_the_same_time_with_and_without_backfill(seeds: range) -> None:
    compared = 0
    for seed in seeds:
        forks = Forks(seed)
        simulate(random_trace(seed, exact=True), watchers=(forks,))
        compared += forks.compared
    assert compared > 20
