"""Rate limits: a bucket of tokens for each key, and one of mistakes for each address."""

from __future__ import annotations

import time
from collections.abc import Callable

FAILURES_PER_S = 1.0
"""Wrong credentials from one address, in the long run."""
FAILURES_AT_ONCE = 30
_MOST_BUCKETS = 10_000


class Buckets:
    """A bucket for each name, which refills at a constant rate. One thread uses it."""

    def __init__(self, rate_per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate_per_s = rate_per_s
        self._burst = float(burst)
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait_s(self, name: str) -> float:
        """How long it takes until there is a token; 0 when there is one."""
        return max(0.0, (1.0 - self._level(name, self._clock())) / self._rate_per_s)

    def take(self, name: str) -> float:
        """Take a token and return 0; or, where there is none, return how long it takes until there is one."""
        now = self._clock()
        level = self._level(name, now)
        if level < 1.0:
            return (1.0 - level) / self._rate_per_s
        if len(self._buckets) >= _MOST_BUCKETS:
            self._forget_full(now)
        self._buckets[name] = (level - 1.0, now)
        return 0.0

    def _level(self, name: str, now: float) -> float:
        level, at = self._buckets.get(name, (self._burst, now))
        return min(self._burst, level + (now - at) * self._rate_per_s)

    def _forget_full(self, now: float) -> None:
        """A full bucket is as good as none. Where none is full, everybody begins anew."""
        kept = {name: each for name, each in self._buckets.items() if self._level(name, now) < self._burst}
        self._buckets = kept if len(kept) < _MOST_BUCKETS else {}
