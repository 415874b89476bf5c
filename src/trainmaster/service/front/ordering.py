"""The order of one model's operations: they come in any order and more than once, and leave in sequence, each once."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import Generic, TypeVar

Item = TypeVar("Item")

REMEMBERED = 16_384
"""How many operations back a repeat is compared with the first; clients repeat within minutes."""


class Placement(Enum):
    """What an operation is to the order."""

    NEW = auto()
    REPEAT = auto()
    """It was here before; it is not done again."""
    CONFLICT = auto()
    """Another one was here under its number."""


class Order(Generic[Item]):
    """Operations by `seq_id`, which begins at 1 and has no gaps."""

    def __init__(self) -> None:
        self.next_seq_id = 1
        """The one that everything behind it waits for."""
        self._waiting: dict[int, Item] = {}
        self._digests: dict[int, bytes] = {}

    def place(self, seq_id: int, digest: bytes, item: Item) -> Placement:
        """Take an operation in, unless it is here or was here; `digest` tells it from others."""
        if seq_id < self.next_seq_id or seq_id in self._waiting:
            known = self._digests.get(seq_id, digest)
            return Placement.REPEAT if known == digest else Placement.CONFLICT
        self._waiting[seq_id] = item
        self._digests[seq_id] = digest
        return Placement.NEW

    def leave(self) -> Iterator[Item]:
        """What can go now, in order."""
        while self.next_seq_id in self._waiting:
            item = self._waiting.pop(self.next_seq_id)
            self._digests.pop(self.next_seq_id - REMEMBERED, None)
            self.next_seq_id += 1
            yield item

    def abandon(self) -> list[Item]:
        """Everything that still waits, which will not go any more."""
        waiting = [self._waiting[seq_id] for seq_id in sorted(self._waiting)]
        self._waiting.clear()
        return waiting

    @property
    def waiting(self) -> int:
        """How many wait for an earlier one."""
        return len(self._waiting)
