"""Waiting for a job: what was asked for, when to look, and until when."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterable

from trainmaster.trainer.job_view import ALL_STATUSES
from trainmaster.trainer.progress_bar import display
from trainmaster.trainer.types import TrainJob


class Wait:
    """One wait for some statuses."""

    def __init__(self, status: Iterable[str], timeout: float, polling_interval: float) -> None:
        """Check what was asked for.

        Raises:
            ValueError: it cannot be waited for.
        """
        self.wanted = frozenset([status] if isinstance(status, str) else status)
        unknown = sorted(str(each) for each in self.wanted - ALL_STATUSES)
        if unknown or not self.wanted:
            known = ", ".join(sorted(ALL_STATUSES))
            raise ValueError(f"status must be some of {known}, not {', '.join(unknown) or 'nothing'}")
        if timeout <= 0 or polling_interval <= 0:
            raise ValueError(f"timeout and polling_interval must be more than 0, not {timeout} and {polling_interval}")
        if polling_interval >= timeout:
            raise ValueError(f"polling_interval ({polling_interval}) must be less than timeout ({timeout})")
        self._timeout_s = timeout
        self._interval_s = polling_interval
        self._display = display()
        self._last: TrainJob | None = None

    def looks(self) -> Generator[None, None, None]:
        """Whenever it is time for a look, the last time when the time is up."""
        deadline = time.monotonic() + self._timeout_s
        with contextlib.closing(self._display):
            while True:
                yield
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                time.sleep(min(self._interval_s, left))

    def show(self, job: TrainJob) -> None:
        """Tell whoever waits."""
        self._last = job
        self._display.show(job)

    def words(self) -> str:
        """What is waited for."""
        return " or ".join(sorted(self.wanted))

    def too_late(self, name: str) -> str:
        """What to say when the time is up."""
        if self._last is None:
            return f"the server has not answered for {self._timeout_s:g} s, so nothing is known of job {name}"
        seen = f"{self._last.status} ({self._last.state})"
        if self._last.message:
            seen += f": {self._last.message}"
        return f"job {name} is not {self.words()} after {self._timeout_s:g} s; it is {seen}"
