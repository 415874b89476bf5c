"""How far a job is while somebody waits for it: a bar in a terminal or a notebook, and nothing elsewhere."""

from __future__ import annotations

import html
import sys
from importlib import import_module
from typing import Any, Protocol

from trainmaster.trainer.types import TrainJob

SHOWN_METRICS = ("loss", "eval_loss")


class Display(Protocol):
    """Where a job is shown."""

    def show(self, job: TrainJob) -> None:
        """Show it as it is now."""

    def close(self) -> None:
        """It will not change any more, or nobody waits."""


def display() -> Display:
    """The one that whoever waits sees."""
    if _in_notebook():
        return NotebookBar()
    return TerminalBar() if sys.stderr is not None and sys.stderr.isatty() else Nowhere()


def percent(job: TrainJob) -> float | None:
    """How much is done, if the job says so."""
    progress = job.progress
    if job.status == "Complete":
        return 100.0
    if progress.percent is not None:
        return min(max(progress.percent, 0.0), 100.0)
    if progress.step is not None and progress.total_steps:
        return min(100.0 * progress.step / progress.total_steps, 100.0)
    return None


def line(job: TrainJob) -> str:
    """What stands beside the bar."""
    progress = job.progress
    steps = ""
    if progress.step is not None:
        steps = f"step {progress.step}" + (f" of {progress.total_steps}" if progress.total_steps else "")
    measured = [f"{name} {value:.4g}" for name in SHOWN_METRICS if (value := job.metrics.get(name)) is not None]
    remaining = f"{progress.eta_seconds:.0f} s left" if progress.eta_seconds and job.status == "Running" else ""
    waiting = job.message if job.status == "Created" and job.message else ""
    return " · ".join(part for part in (job.state, steps, *measured, remaining, waiting) if part)


class Nowhere:
    """Nobody looks."""

    def show(self, job: TrainJob) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing is there."""


class TerminalBar:
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
        """Draw it anew."""
        done = percent(job)
        if self._task is None:
            self._task = self._progress.add_task("", total=None, job=job.name, line="")
            self._progress.start()
        total = None if done is None else 100.0
        self._progress.update(self._task, total=total, completed=done or 0.0, job=job.name, line=line(job))

    def close(self) -> None:
        """Take it away."""
        self._progress.stop()


class NotebookBar:
    """A bar below the cell, which stays as it was last."""

    def __init__(self) -> None:
        self._display: Any = import_module("IPython.display")
        self._handle: Any = None

    def show(self, job: TrainJob) -> None:
        """Draw it anew."""
        shown = self._display.HTML(bar_html(job))
        if self._handle is None:
            self._handle = self._display.display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def close(self) -> None:
        """It stays."""


def bar_html(job: TrainJob) -> str:
    """The bar of a notebook."""
    done = percent(job)
    value = "" if done is None else f' value="{done:.1f}"'
    name, said = html.escape(job.name), html.escape(line(job))
    return f'<div><code>{name}</code> <progress max="100"{value}></progress> {said}</div>'


def _in_notebook() -> bool:
    # Where nobody has imported it, this is no notebook.
    interactive = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(interactive, "kernel", None) is not None
