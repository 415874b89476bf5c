"""What is wrong with the API server at the moment."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from kubernetes_server.statuses import too_many_requests, unavailable


@dataclass
class ApiFaults:
    slow_s: float = 0.0
    throttled: int = 0
    """How many further requests are refused with 429; -1 for all."""
    throttled_every: int = 1
    """Of those, only one in so many is refused."""
    retry_after_s: int = 1
    unavailable_until: float = 0.0
    """Until when (by the monotonic clock) every request is answered with 503."""
    missing_images: set[str] = field(default_factory=set)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def meet(self) -> None:
        """Let one request suffer.

        Raises:
            StatusError: 429 or 503.
        """
        if self.slow_s:
            await asyncio.sleep(self.slow_s)
        if time.monotonic() < self.unavailable_until:
            raise unavailable()
        if self.throttled:
            if self.throttled > 0:
                self.throttled -= 1
            if next(self._numbers) % self.throttled_every == 0:
                raise too_many_requests(self.retry_after_s)

    def clear(self) -> None:
        self.slow_s = 0.0
        self.throttled = 0
        self.throttled_every = 1
        self.unavailable_until = 0.0
        self.missing_images.clear()
