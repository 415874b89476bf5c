from __future__ import annotations

from typing import Any

import pytest

from trainmaster.protocol.documents import is_deeper


def nested(levels: int, inner: Any) -> Any:
    for number in range(levels):
        inner = {"a": inner} if number % 2 else [0, inner]
    return inner


@pytest.mark.parametrize("inner", [1, "x", None])
def test_objects_and_lists_count_and_nothing_else_does(inner: Any) -> None:
    assert not is_deeper(inner, 0)
    assert not is_deeper(nested(64, inner), 64)
    assert is_deeper(nested(65, inner), 64)
    assert is_deeper([nested(64, inner), inner], 64)


@pytest.mark.parametrize("empty", [{}, []])
def test_what_is_empty_counts_too(empty: Any) -> None:
    assert not is_deeper(nested(63, empty), 64)
    assert is_deeper(nested(64, empty), 64)
