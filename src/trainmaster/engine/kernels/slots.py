"""What a step of decoding leaves of each running sequence for the next one."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def advance_slots(rows: Tensor, chosen: Tensor, tokens: Tensor, positions: Tensor) -> None:
    """Make the chosen tokens, int64 [n], the last ones of the sequences `rows`, each a position further.

    The last sequence is a spare one: nothing is kept of it.
    """
    count = len(rows)
    _advance[(1,)](rows, chosen, tokens, positions, count, len(tokens) - 1, ROWS=triton.next_power_of_2(count))


@triton.jit
def _advance(rows, chosen, tokens, positions, count, spare, ROWS: tl.constexpr):
    places = tl.arange(0, ROWS)
    sequence = tl.load(rows + places, mask=places < count, other=0)
    inside = (places < count) & (sequence != spare)
    tl.store(tokens + sequence, tl.load(chosen + places, mask=inside, other=0), mask=inside)
    tl.store(positions + sequence, tl.load(positions + sequence, mask=inside, other=0) + 1, mask=inside)
