"""Output of commands: JSON for programs, tables for people, plain columns in a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from trainmaster.cli.exits import say

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


PIPED_WIDTH = 10_000
"""A program that reads the columns wants them whole."""

FLEXIBLE_WIDTH = 24
"""A column that can be cut or wrapped is no use with less than this."""

STYLE_OF_STATUS: Mapping[str, str] = MappingProxyType(
    {
        "PENDING": "dim",
        "QUEUED": "yellow",
        "SCHEDULING": "cyan",
        "PREPARING": "cyan",
        "TRAINING": "bold cyan",
        "CHECKPOINTING": "bold cyan",
        "EVALUATING": "bold cyan",
        "EXPORTING": "bold cyan",
        "PAUSED": "yellow",
        "COMPLETED": "green",
        "FAILED": "bold red",
        "CANCELLED": "dim",
        "PREEMPTED": "magenta",
    }
)


def print_json(document: object) -> None:
    """Write one JSON document: indented for a person, on one line for a program."""
    indent = 2 if sys.stdout.isatty() else None
    sys.stdout.write(json.dumps(document, indent=indent, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_json_line(document: object) -> None:
    """Write one of many JSON documents, each on a line of its own."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def console() -> Console:
    """The standard output: with colours for a person, without for a pipe."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def draw(*renderables: RenderableType) -> None:
    """Write things below each other; without the padding when nobody looks."""
    out = console()
    if out.is_terminal:
        out.print(*renderables, sep="\n")
        return
    with out.capture() as captured:
        out.print(*renderables, sep="\n")
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def styled(text: str, style: str = "") -> Text:
    """Text that is never read as markup, whoever wrote it."""
    from rich.text import Text

    return Text(text, style=style)


def status_text(status: str) -> Text:
    return styled(status, STYLE_OF_STATUS.get(status, ""))


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Collection[str] = (),
    cut: Collection[str] = (),
    wrap: Collection[str] = (),
    spare: Sequence[str] = (),
) -> Table:
    """Columns without lines. An empty column is left out, too.

    On a narrow terminal the columns in `spare` go, the first of them first, until the rest fits; then those in `cut`
    and `wrap` give way, the first with an ellipsis, the others with more lines; the rest stays whole.
    """
    from rich.table import Table

    drawn = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    kept_rows = [[styled(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    kept = [index for index, heading in enumerate(headings) if any(row[index].plain for row in kept_rows)]
    widths = {index: _width(headings[index], [row[index] for row in kept_rows], (*cut, *wrap)) for index in kept}
    for heading in spare:
        if sum(widths[index] for index in kept) > console().width:
            kept = [index for index in kept if headings[index] != heading]
    for index in kept:
        heading = headings[index]
        if heading in cut:
            for row in kept_rows:
                row[index].no_wrap, row[index].overflow = True, "ellipsis"
        drawn.add_column(heading, justify="right" if heading in right else "left", no_wrap=heading not in (*cut, *wrap))
    for row in kept_rows:
        drawn.add_row(*(row[index] for index in kept))
    return drawn


def _width(heading: str, cells: Iterable[Text], flexible: Collection[str]) -> int:
    """How wide a column has to be at least, with the space after it."""
    widest = max((cell.cell_len for cell in cells), default=0)
    return max(len(heading), min(widest, FLEXIBLE_WIDTH) if heading in flexible else widest) + 2


def facts(pairs: Mapping[str, Any]) -> Table:
    """Names and values below each other. What has no value is left out."""
    from rich.table import Table

    drawn = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    drawn.add_column(style="dim", no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, value in pairs.items():
        if value not in (None, "", [], {}):
            drawn.add_row(f"  {name}", styled(value) if isinstance(value, str) else value)
    return drawn


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
