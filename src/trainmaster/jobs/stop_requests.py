"""Requests to a running job class, by the server or by a signal: to save, or to stop. All ranks agree on them."""

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


class StopRequests:
    """The requests, the same on every rank. `look` is collective; nothing changes between two looks."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._signalled = False
        self.stop: Stop | None = None
        """The stop that all ranks agreed on."""

    def look(self) -> bool:
        """Check for requests; returns whether to save, with or without a stop."""
        stop = report.stop_requested()
        if stop is None and self._signalled:
            stop = Stop(cause=StopCause.PREEMPT, save=True, deadline=math.inf)
        save = report.save_requested()
        # One message between the ranks in nearly every step; more only when one of them has a request.
        if not self._process.any(stop is not None or save):
            return False
        by_rank = self._process.gather(json.dumps({"stop": _to_json(stop), "save": save}).encode())
        agreed = self._process.broadcast(_agreed([json.loads(each) for each in by_rank]), "requests")
        if agreed["stop"] is not None:
            self.stop = Stop(
                cause=StopCause(agreed["stop"]["cause"]),
                save=agreed["stop"]["save"],
                deadline=agreed["stop"]["deadline"] or math.inf,
            )
        return bool(agreed["save"] or (self.stop is not None and self.stop.save))

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Treat SIGTERM and Ctrl-C as a request to save and stop while the block lasts. A second signal acts as usual.

        Inside a job of a server signals are left alone: requests come by the control file there, and SIGTERM ends the
        process.
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
        sys.stderr.write(
            f"trainmaster: {name}: saving and stopping after this step; a second signal ends the job at once\n"
        )


_INTERRUPT = signal.default_int_handler


def _to_json(stop: Stop | None) -> dict[str, Any] | None:
    if stop is None:
        return None
    return {
        "cause": stop.cause,
        "save": stop.save,
        "deadline": stop.deadline if math.isfinite(stop.deadline) else None,
    }


def _agreed(by_rank: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The requests that all ranks follow: the first stop that any of them has seen."""
    return {
        "stop": next((each["stop"] for each in by_rank if each["stop"]), None),
        "save": any(each["save"] for each in by_rank),
    }
