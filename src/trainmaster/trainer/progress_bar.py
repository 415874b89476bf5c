"""Waiting for a job, with a progress bar in a terminal or a notebook."""

from __future__ import annotations

import contextlib
import html
import sys
import time
from collections.abc import Generator, Iterable
from importlib import import_module
from typing import Any

from trainmaster.trainer.job_view import ALL_STATUSES
from trainmaster.trainer.types import TrainJob

SHOWN_METRICS = ("loss", "eval_loss")


class Display:
    """Shows a job while somebody waits for it. This one shows nothing: nobody looks."""

    def show(self, job: TrainJob) -> None: ...

    def close(self) -> None: ...


def display() -> Display:
    # Where nobody has imported it, this is no notebook.
    interactive = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(interactive, "kernel", None) is not None:
        return NotebookBar()
    return TerminalBar() if sys.stderr is not None and sys.stderr.isatty() else Display()


def percent(job: TrainJob) -> float | None:
    progress = job.progress
    if job.status == "Complete":
        return 100.0
    if progress.percent is not None:
        return min(max(progress.percent, 0.0), 100.0)
    if progress.step is not None and progress.total_steps:
        return min(100.0 * progress.step / progress.total_steps, 100.0)
    return None


def line(job: TrainJob) -> str:
    progress = job.progress
    steps = ""
    if progress.step is not None:
        steps = f"step {progress.step}" + (f" of {progress.total_steps}" if progress.total_steps else "")
    measured = [f"{name} {value:.4g}" for name in SHOWN_METRICS if (value := job.metrics.get(name)) is not None]
    remaining = f"{progress.eta_seconds:.0f} s left" if progress.eta_seconds and job.status == "Running" else ""
    waiting = job.message if job.status == "Created" and job.message else ""
    return " · ".join(part for part in (job.state, steps, *measured, remaining, waiting) if part)


class TerminalBar(Display):
    """A line at the bottom of a terminal, which is gone afterwards."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.fields[job]}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[line]}", markup=False),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task: Any = None

    def show(self, job: TrainJob) -> None:
        done = percent(job)
        if self._task is None:
            self._task = self._progress.add_task("", total=None, job=job.name, line="")
            self._progress.start()
        total = None if done is None else 100.0
        self._progress.update(self._task, total=total, completed=done or 0.0, job=job.name, line=line(job))

    def close(self) -> None:
        self._progress.stop()


class NotebookBar(Display):
    """A bar below the cell, which stays as it was last."""

    def __init__(self) -> None:
        self._display: Any = import_module("IPython.display")
        self._handle: Any = None

    def show(self, job: TrainJob) -> None:
        shown = self._display.HTML(bar_html(job))
        if self._handle is None:
            self._handle = self._display.display(shown, display_id=True)
        else:
            self._handle.update(shown)


def bar_html(job: TrainJob) -> str:
    done = percent(job)
    value = "" if done is None else f' value="{done:.1f}"'
    name, said = html.escape(job.name), html.escape(line(job))
    return f'<div><code>{name}</code> <progress max="100"{value}></progress> {said}</div>'


class Wait:
    def __init__(self, status: Iterable[str], timeout: float, polling_interval: float) -> None:
        """Raises ValueError if what was asked for cannot be waited for."""
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
        self._last = job
        self._display.show(job)

    def words(self) -> str:
        return " or ".join(sorted(self.wanted))

    def too_late(self, name: str) -> str:
        if self._last is None:
            return f"the server has not answered for {self._timeout_s:g} s, so nothing is known of job {name}"
        seen = f"{self._last.status} ({self._last.state})" + (f": {self._last.message}" if self._last.message else "")
        return f"job {name} is not {self.words()} after {self._timeout_s:g} s; it is {seen}"
