"""What a step of decoding reads of each running sequence before it computes, and what it leaves there."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def read_slots(
    rows: Tensor, tokens: Tensor, positions: Tensor, tables: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The last tokens of the sequences `rows`, int64 [n], their positions, and where their keys and values belong.

    `tokens` and `positions` are int64 [sequences], `tables` int32 [strata, sequences, blocks]; what belongs where is
    int64 [strata, n]: a slot of the pool, or -1 for the spare sequence, which is the last one.
    """
    count, strata, sequences, blocks = len(rows), *tables.shape
    own_tokens, own_positions = tokens.new_empty(count), tokens.new_empty(count)
    slots = tokens.new_empty((strata, count))
    _read[(strata,)](
        rows, tokens, positions, tables, own_tokens, own_positions, slots, count, sequences, blocks,
        BLOCK=block, ROWS=triton.next_power_of_2(count),
    )  # fmt: skip
    return own_tokens, own_positions, slots


def advance_slots(rows: Tensor, chosen: Tensor, tokens: Tensor, positions: Tensor) -> None:
    """Make the chosen tokens, int64 [n], the last ones of their sequences, each a position further; not the spare."""
    count = len(rows)
    _advance[(1,)](rows, chosen, tokens, positions, count, len(tokens) - 1, ROWS=triton.next_power_of_2(count))


@triton.jit
def _read(
    rows, tokens, positions, tables, own_tokens, own_positions, slots, count, sequences, blocks,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    stratum = tl.program_id(0)
    places = tl.arange(0, ROWS)
    inside = places < count
    sequence = tl.load(rows + places, mask=inside, other=0)
    token = tl.load(tokens + sequence, mask=inside, other=0)
    position = tl.load(positions + sequence, mask=inside, other=0)
    table = tables + (stratum * sequences + sequence) * blocks
    page = tl.load(table + position // BLOCK, mask=inside, other=0).to(tl.int64)
    slot = tl.where(sequence == sequences - 1, -1, page * BLOCK + position % BLOCK)
    tl.store(slots + stratum * count + places, slot, mask=inside)
    if stratum == 0:
        tl.store(own_tokens + places, token, mask=inside)
        tl.store(own_positions + places, position, mask=inside)


@triton.jit
def _advance(rows, chosen, tokens, positions, count, spare, ROWS: tl.constexpr):
    places = tl.arange(0, ROWS)
    sequence = tl.load(rows + places, mask=places < count, other=0)
    inside = (places < count) & (sequence != spare)
    tl.store(tokens + sequence, tl.load(chosen + places, mask=inside, other=0), mask=inside)
    tl.store(positions + sequence, tl.load(positions + sequence, mask=inside, other=0) + 1, mask=inside)
