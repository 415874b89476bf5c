"""What this process counts while it works: plain numbers, so that counting costs next to nothing.

Each number is written by one thread alone and read by any; `/metrics` shows them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LATENCIES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class Histogram:
    """How often values up to each of some bounds were seen."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Of the values up to each bound and above the one before; the last is for those above all."""
        self.total = 0.0
        """The sum of all values."""

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Meters:
    """Everything that is counted."""

    def __init__(self) -> None:
        self.submissions = 0
        """Jobs that were stored."""
        self.commit_sizes = Histogram(SIZES)
        """Closures in each transaction of the database's writer."""
        self.passes_s = Histogram(LATENCIES_S)
        """How long each pass of the coordinator took."""
        self.placements = 0
        """Attempts that were opened."""
        self.preemptions = 0
        """Attempts that were asked to make room."""
        self.webhooks_delivered = 0
        self.webhooks_failed = 0
        self.requests: dict[tuple[str, str, int], int] = {}
        """Answers by method, route and status."""
        self.latencies_s: dict[tuple[str, str], Histogram] = {}
        """Until an answer began, by method and route."""

    def answered(self, method: str, route: str, status: int, took_s: float) -> None:
        """Count an answer."""
        key = (method, route, status)
        self.requests[key] = self.requests.get(key, 0) + 1
        latencies = self.latencies_s.get((method, route))
        if latencies is None:
            latencies = self.latencies_s[method, route] = Histogram(LATENCIES_S)
        latencies.observe(took_s)


METERS = Meters()
"""Of this process."""
