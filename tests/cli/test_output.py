from __future__ import annotations

import pytest
from rich.text import Text

from trainmaster.cli import output

HEADINGS = ("ID", "NOTE", "SIZE", "WHERE")
ROW = ("job-1", "a note that is rather long, and may well be cut", "12 GiB", "rack-7")


def headings(monkeypatch: pytest.MonkeyPatch, width: int) -> list[str]:
    monkeypatch.setattr(output, "PIPED_WIDTH", width)
    drawn = output.table(HEADINGS, [[Text(cell) for cell in ROW]], cut=("NOTE",), spare=("WHERE", "SIZE"))
    return [str(column.header) for column in drawn.columns]


def test_spare_columns_go_one_after_the_other_as_the_terminal_narrows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert headings(monkeypatch, 100) == ["ID", "NOTE", "SIZE", "WHERE"]
    assert headings(monkeypatch, 45) == ["ID", "NOTE", "SIZE"]
    assert headings(monkeypatch, 36) == ["ID", "NOTE"]
    assert headings(monkeypatch, 10) == ["ID", "NOTE"]
