"""Tables: how jobs, runtimes, steps and events look in a notebook and in a terminal."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, SupportsIndex, TypeVar, overload

if TYPE_CHECKING:
    from rich.console import RenderableType

Row = dict[str, str]
"""Heading -> what stands below it."""
NONE = "none"


class Shown(ABC):
    """Something that is one row of a table."""

    @abstractmethod
    def row(self) -> Row:
        """What is shown of it."""

    def _repr_html_(self) -> str:
        return html_table([self.row()])

    def __rich__(self) -> RenderableType:
        return rich_table([self.row()])


ShownT = TypeVar("ShownT", bound=Shown)


class Listing(list[ShownT]):
    """A list that a notebook and rich show as a table; and so is a part of it."""

    @overload
    def __getitem__(self, chosen: SupportsIndex, /) -> ShownT: ...

    @overload
    def __getitem__(self, chosen: slice, /) -> Listing[ShownT]: ...

    def __getitem__(self, chosen: SupportsIndex | slice, /) -> ShownT | Listing[ShownT]:
        if isinstance(chosen, slice):
            return Listing(super().__getitem__(chosen))
        return super().__getitem__(chosen)

    def _repr_html_(self) -> str:
        return html_table(item.row() for item in self)

    def __rich__(self) -> RenderableType:
        return rich_table(item.row() for item in self)


def html_table(rows: Iterable[Row]) -> str:
    """The rows as HTML; whatever they say is shown as text."""
    shown = list(rows)
    if not shown:
        return f"<p>{NONE}</p>"
    head = _html_row("th", list(shown[0]))
    body = "".join(_html_row("td", list(row.values())) for row in shown)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def rich_table(rows: Iterable[Row]) -> RenderableType:
    """The rows as a table of rich."""
    from rich.table import Table
    from rich.text import Text

    shown = list(rows)
    if not shown:
        return Text(NONE)
    table = Table(*shown[0])
    for row in shown:
        table.add_row(*(Text(cell) for cell in row.values()))  # a Text, as square brackets would be markup
    return table


def moment(when: datetime | None) -> str:
    """A time to the second, in its own time zone."""
    return when.strftime("%Y-%m-%d %H:%M:%S") if when else ""


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"
