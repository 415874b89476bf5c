"""Output of commands: JSON for programs, tables for people, plain columns in a pipe; numbers, times and sizes."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import typer

from trainmaster.cli.exits import say

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text


Item = TypeVar("Item")

PIPED_WIDTH = 10_000
"""A program that reads the columns wants them whole."""

FLEXIBLE_WIDTH = 24
"""A column that can be cut or wrapped is no use with less than this."""

STYLE_OF_STATUS: Mapping[str, str] = {
    **dict.fromkeys(("PENDING", "CANCELLED"), "dim"),
    **dict.fromkeys(("QUEUED", "PAUSED"), "yellow"),
    **dict.fromkeys(("SCHEDULING", "PREPARING"), "cyan"),
    **dict.fromkeys(("TRAINING", "CHECKPOINTING", "EVALUATING", "EXPORTING"), "bold cyan"),
    "COMPLETED": "green",
    "FAILED": "bold red",
    "PREEMPTED": "magenta",
}


def print_json(document: object) -> None:
    """Write one JSON document: indented for a person, on one line for a program."""
    sys.stdout.write(json.dumps(document, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_json_line(document: object) -> None:
    sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_result(document: object, *lines: str, as_json: bool) -> None:
    """Write what a command has done: the document for a program, lines for a person."""
    if as_json:
        print_json(document)
    else:
        for line in lines:
            typer.echo(line)


class TableLayout(TypedDict, total=False):
    """How the columns of a table give way on a narrow terminal; `table` says how."""

    right: Collection[str]
    cut: Collection[str]
    wrap: Collection[str]
    spare: Sequence[str]


def print_list(
    found: Sequence[Item],
    headings: Sequence[str],
    row: Callable[[Item], Sequence[str | Text]],
    *,
    as_json: bool,
    if_none: str = "",
    **layout: Unpack[TableLayout],
) -> None:
    """Write a list: JSON for a program, for a person a table or, of an empty list, the words `if_none`."""
    if as_json:
        print_json(found)
    elif found or not if_none:
        draw(table(headings, map(row, found), **layout))
    else:
        typer.echo(if_none)


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


# Numbers, times and sizes as people read them.

_BARS = "▁▂▃▄▅▆▇█"


def seconds_between(earlier: str, later: str | None = None) -> float:
    start = datetime.fromisoformat(earlier)
    end = datetime.fromisoformat(later) if later else datetime.now(start.tzinfo)
    return max((end - start).total_seconds(), 0.0)


def duration(seconds: float | None) -> str:
    """The two largest units of a duration.

    >>> duration(0.25), duration(59), duration(61), duration(7_260), duration(200_000), duration(None)
    ('0.2s', '59s', '1m 01s', '2h 01m', '2d 07h', '')
    """
    if seconds is None:
        return ""
    if seconds < 10 and seconds != int(seconds):
        return f"{math.floor(seconds * 10) / 10:.1f}s"
    whole = int(seconds)
    for size, unit, smaller, small_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // smaller:02d}{small_unit}"
    return f"{whole}s"


def about(seconds: float) -> str:
    """A time that is not known to the second.

    >>> about(4), about(100), about(2400), about(9000), about(400_000)
    ('4 s', '2 min', '40 min', '2.5 h', '4.6 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86400:.1f} days"


def age(timestamp: str | None) -> str:
    """How long ago something was, in its largest unit.

    >>> age(None)
    ''
    """
    return duration(int(seconds_between(timestamp))).partition(" ")[0] if timestamp else ""


def clock(timestamp: str | None) -> str:
    return datetime.fromisoformat(timestamp).astimezone().strftime("%Y-%m-%d %H:%M:%S") if timestamp else ""


def size(count: float) -> str:
    """Bytes.

    >>> size(0), size(999), size(2048), size(3.5 * 2**30)
    ('0 B', '999 B', '2.0 KiB', '3.5 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def number(value: float | None) -> str:
    """A metric: four significant digits, whole numbers whole. None stands for what is no finite number.

    >>> number(3.0), number(0.123456), number(1.5e-05), number(12345.6), number(None)
    ('3', '0.1235', '1.5e-05', '12346', 'nan')
    """
    if value is None:
        return "nan"
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """A series as a line of bars, averaged down to a width.

    >>> sparkline([0, 1, 2, 3]), sparkline([5, 5]), sparkline([])
    ('▁▃▆█', '▄▄', '')
    """
    if not values:
        return ""
    groups = min(width, len(values))
    edges = [len(values) * index // groups for index in range(groups + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if low == high:
        return _BARS[3] * groups
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)
