"""What is wanted of a job class while it runs, by the server or by a signal: to save, or to stop. All ranks agree."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from trainmaster.jobs import report
from trainmaster.jobs.attempt import Stop
from trainmaster.jobs.process import Process
from trainmaster.protocol import environment
from trainmaster.protocol.reasons import StopCause

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Wishes:
    """What is wanted, the same on every rank. `look` is collective; between two looks nothing changes."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._signalled = False
        self.stop: Stop | None = None
        """The stop that was agreed on in the last look."""

    def look(self) -> bool:
        """See what is wanted now; whether a save is, with or without a stop."""
        stop = report.stop_requested()
        if stop is None and self._signalled:
            stop = Stop(cause=StopCause.PREEMPT, save=True, deadline=math.inf)
        save = report.save_requested()
        # One word between the ranks in nearly every step; the others follow only when somebody wants something.
        if not self._process.any(stop is not None or save):
            return False
        told = self._process.gather(json.dumps({"stop": _to_json(stop), "save": save}).encode())
        agreed = self._process.broadcast(_agreed([json.loads(each) for each in told]), "wishes")
        if agreed["stop"] is not None:
            self.stop = Stop(
                cause=StopCause(agreed["stop"]["cause"]),
                save=agreed["stop"]["save"],
                deadline=agreed["stop"]["deadline"] or math.inf,
            )
        return bool(agreed["save"] or (self.stop is not None and self.stop.save))

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Take SIGTERM and Ctrl-C for the wish to save and stop, while the block lasts. A second one acts as ever.

        Inside a job of a server nothing is taken: there, wishes come by the control file, and SIGTERM is an order.
        """
        owned = [number for number in _SIGNALS if signal.getsignal(number) in (signal.SIG_DFL, _INTERRUPT)]
        if environment.JOB_ID in os.environ or threading.current_thread() is not threading.main_thread():
            owned = []
        before = {number: signal.signal(number, self._take) for number in owned}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, _frame: object) -> None:
        self._signalled = True
        signal.signal(number, _INTERRUPT if number == signal.SIGINT else signal.SIG_DFL)
        name = signal.Signals(number).name
        sys.stderr.write(f"trainmaster: {name}: saves and stops after this step; a second one ends it at once\n")


_INTERRUPT = signal.default_int_handler


def _to_json(stop: Stop | None) -> dict[str, Any] | None:
    if stop is None:
        return None
    return {
        "cause": stop.cause,
        "save": stop.save,
        "deadline": stop.deadline if math.isfinite(stop.deadline) else None,
    }


def _agreed(told: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks go by: the first stop that any of them has heard of."""
    return {
        "stop": next((each["stop"] for each in told if each["stop"]), None),
        "save": any(each["save"] for each in told),
    }
