from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmaster.jobs.checkpoint_saver import to_remove

FIVE = ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("limit", "needed", "gone"),
    [
        (None, {}, []),
        (0, {}, []),
        (5, {}, []),
        (9, {}, []),
        (2, {}, ["1", "2", "3"]),
        (1, {}, ["1", "2", "3", "4"]),
        (2, {"best": "1"}, ["2", "3"]),
        (1, {"best": "5"}, ["1", "2", "3", "4"]),
        (2, {"best": "5"}, ["1", "2", "3"]),
        (2, {"pinned": {"1", "2"}}, ["3"]),
        (1, {"in_flight": {"6"}}, ["1", "2", "3"]),
        (2, {"in_flight": {"1"}}, ["2", "3"]),
        (1, {"best": "gone"}, ["1", "2", "3", "4"]),
    ],
)
def test_oldest_beyond_the_limit_go_but_for_what_is_needed(limit: int | None, needed: dict, gone: list[str]) -> None:
    assert to_remove(FIVE, limit=limit, **needed) == gone


@given(
    count=st.integers(0, 12),
    limit=st.none() | st.integers(0, 12),
    best=st.none() | st.integers(0, 12),
    pinned=st.sets(st.integers(0, 12)),
    in_flight=st.sets(st.integers(0, 14)),
)
def test_what_is_needed_never_goes(
    count: int, limit: int | None, best: int | None, pinned: set[int], in_flight: set[int]
) -> None:
    checkpoints = [str(number) for number in range(count)]
    gone = to_remove(
        checkpoints,
        limit=limit,
        best=None if best is None else str(best),
        pinned={str(number) for number in pinned},
        in_flight={str(number) for number in in_flight},
    )
    left = [name for name in checkpoints if name not in gone]
    assert set(gone) <= set(checkpoints)
    assert gone == sorted(gone, key=checkpoints.index)
    assert not set(gone) & {str(number) for number in (*pinned, *in_flight, -1 if best is None else best)}
    assert left[-1:] == checkpoints[-1:]
    if limit:
        kept = {*pinned, *in_flight, *({best} - {count - 1})}
        counted = [number for number in range(count) if number not in kept]
        assert len([name for name in left if int(name) not in kept]) >= min(limit, len(counted))
