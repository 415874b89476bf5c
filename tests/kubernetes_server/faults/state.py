"""What is wrong with the API server at the moment."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from kubernetes_server.statuses import too_many_requests, unavailable


@dataclass
class ApiFaults:
    slow_s: float = 0.0
    throttled: int = 0
    """How many further requests are refused with 429; -1 for all."""
    retry_after_s: int = 1
    unavailable_until: float = 0.0
    """Until when (by the monotonic clock) every request is answered with 503."""
    missing_images: set[str] = field(default_factory=set)

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
            raise too_many_requests(self.retry_after_s)

    def clear(self) -> None:
        self.slow_s = 0.0
        self.throttled = 0
        self.unavailable_until = 0.0
        self.missing_images.clear()
