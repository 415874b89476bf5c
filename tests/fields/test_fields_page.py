"""docs/reference/fields.md is what the tables say."""

from __future__ import annotations

from page import PAGE, page


def test_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"
