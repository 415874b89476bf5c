"""A sign of life for what takes long, on the other output, where a person sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainmaster.cli.exits import say


@contextmanager
def waiting(message: str, *, quiet: bool) -> Iterator[None]:
    """Say what is being waited for, as long as it lasts."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message, spinner_style="cyan"):
        yield


@contextmanager
def byte_bar(total: int, *, quiet: bool, interrupted: str) -> Iterator[Callable[[int], None]]:
    """Count bytes; `interrupted` is said after a Ctrl-C."""
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        try:
            yield lambda count: bar.advance(task, count)
        except KeyboardInterrupt:
            bar.stop()
            say(interrupted)
            raise
