"""Whether the service shall stop: as the server says or, where it says nothing, as a signal does."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Iterator

from trainmaster.jobs.control_file import LOOK_EVERY_S, Stop
from trainmaster.jobs.reporter import Reporter
from trainmaster.protocol.reasons import StopCause

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Wishes:
    """What is wanted of this process."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._signalled = False

    def stop(self) -> Stop | None:
        """The stop that was asked for."""
        if self._signalled and self._reporter.stop_requested() is None:
            # Whoever sends a signal for the server has said why just before.
            time.sleep(2 * LOOK_EVERY_S)
        stop = self._reporter.stop_requested()
        if stop is None and self._signalled:
            return Stop(cause=StopCause.PREEMPT, save=True, deadline=math.inf)
        return stop

    def take_save(self) -> bool:
        """Whether all models shall be saved while the service goes on; true once per request."""
        return self._reporter.save_requested()

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Take SIGTERM and Ctrl-C for the wish to stop, while the block lasts. A second one acts as ever."""
        before = {number: signal.signal(number, self._take) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, _frame: object) -> None:
        self._signalled = True
        signal.signal(number, signal.SIG_DFL)
        name = signal.Signals(number).name
        sys.stderr.write(f"trainmaster: {name}: stops after what is under way; a second one ends it at once\n")
