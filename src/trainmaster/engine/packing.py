"""Which sequences are computed together: pure, so that what is computed alone and what in company can be compared.

A request is cut into chunks by its own sequences alone, and a pack has at most one chunk of a model. So the sums over
rows that make a model's gradients are the same sums whoever else is in the pack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol, TypeVar


class Packable(Protocol):
    """A chunk, as far as it matters here."""

    @property
    def rows(self) -> int:
        """How many tokens it has."""

    @property
    def owner(self) -> Hashable:
        """The model whose gradients it adds to: one chunk of it at a time, in order."""

    @property
    def kind(self) -> Hashable:
        """Chunks of one kind can be computed together."""


C = TypeVar("C", bound=Packable)


def cut(lengths: Sequence[int], widths: Sequence[Hashable], budget: int) -> list[range]:
    """Consecutive sequences, at most `budget` tokens each unless one sequence is longer, all of one width.

    Args:
        lengths: Tokens of each sequence.
        widths: Targets that each of its positions has.
        budget: In tokens.
    """
    chunks: list[range] = []
    start, room = 0, budget
    for index, length in enumerate(lengths):
        if index > start and (length > room or widths[index] != widths[start]):
            chunks.append(range(start, index))
            start, room = index, budget
        room -= length
    return [*chunks, range(start, len(lengths))]


def pack(chunks: Sequence[C], budget: int) -> Iterator[list[C]]:
    """Chunks that are computed together, at most `budget` rows unless one has more; those of an owner in order."""
    waiting: dict[Hashable, deque[C]] = {}
    for chunk in chunks:
        waiting.setdefault(chunk.owner, deque()).append(chunk)
    while waiting:
        first = next(iter(waiting.values()))[0]
        packed, room = [], budget
        for owner, queue in list(waiting.items()):
            chunk = queue[0]
            if chunk is not first and (chunk.kind != first.kind or chunk.rows > room):
                continue
            packed.append(queue.popleft())
            room -= chunk.rows
            if not queue:
                del waiting[owner]
        yield packed


def share(lengths: Sequence[int], ranks: int) -> list[range]:
    """Consecutive sequences for each rank, about the same number of tokens each; a rank may get none."""
    total, done, index = sum(lengths), 0, 0
    shares = []
    for rank in range(ranks):
        start = index
        # A sequence belongs to the rank in whose part its middle lies.
        while index < len(lengths) and (done + lengths[index] / 2) * ranks < total * (rank + 1):
            done += lengths[index]
            index += 1
        shares.append(range(start, index))
    return shares
