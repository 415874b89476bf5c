"""Which sequences are computed together."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from trainmaster.engine.passes import cut, pack, share


@dataclass(frozen=True)
class Chunk:
    owner: str
    rows: int
    kind: str = "k"
    number: int = 0


def test_cut_fills_chunks_up_to_the_budget() -> None:
    assert cut([4, 4, 4, 1, 3], [1] * 5, 8) == [range(2), range(2, 5)]


def test_cut_leaves_a_sequence_whole_that_is_longer_than_the_budget() -> None:
    assert cut([3, 20, 3], [1] * 3, 8) == [range(1), range(1, 2), range(2, 3)]


def test_cut_parts_sequences_of_different_widths() -> None:
    assert cut([1, 1, 1, 1], [0, 0, 5, 5], 100) == [range(2), range(2, 4)]


def test_pack_takes_one_chunk_of_each_owner_at_a_time() -> None:
    chunks = [Chunk("a", 3, number=0), Chunk("a", 3, number=1), Chunk("b", 3, number=2)]
    packs = [[chunk.number for chunk in each] for each in pack(chunks, 100)]
    assert packs == [[0, 2], [1]]


def test_pack_keeps_kinds_apart() -> None:
    chunks = [Chunk("a", 3, "x"), Chunk("b", 3, "y"), Chunk("c", 3, "x")]
    assert [[chunk.owner for chunk in each] for each in pack(chunks, 100)] == [["a", "c"], ["b"]]


OWNED = st.builds(Chunk, st.sampled_from("abcd"), st.integers(1, 30), st.sampled_from("xy"), st.integers(0, 10**9))


@given(st.lists(OWNED, max_size=30), st.integers(1, 40))
def test_every_chunk_is_packed_once_in_its_owners_order(chunks: list[Chunk], budget: int) -> None:
    packs = list(pack(chunks, budget))
    for owner in "abcd":
        assert [c for each in packs for c in each if c.owner == owner] == [c for c in chunks if c.owner == owner]
    for each in packs:
        assert len({chunk.kind for chunk in each}) == 1
        assert len({chunk.owner for chunk in each}) == len(each)
        assert len(each) == 1 or sum(chunk.rows for chunk in each) <= budget


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 60))
def test_every_sequence_is_cut_into_one_chunk(lengths: list[int], budget: int) -> None:
    chunks = cut(lengths, [0] * len(lengths), budget)
    assert [index for chunk in chunks for index in chunk] == list(range(len(lengths)))
    assert all(len(chunk) == 1 or sum(lengths[index] for index in chunk) <= budget for chunk in chunks)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 5))
def test_ranks_share_all_sequences_in_order(lengths: list[int], ranks: int) -> None:
    shares = share(lengths, ranks)
    assert len(shares) == ranks
    assert [index for each in shares for index in each] == list(range(len(lengths)))
    for each in shares:
        assert sum(lengths[index] for index in each) <= sum(lengths) / ranks + max(lengths, default=0)
