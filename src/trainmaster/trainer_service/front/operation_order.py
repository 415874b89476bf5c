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
    FULL = auto()
    """So many wait for an earlier one that no more are taken in."""


class Order(Generic[Item]):
    """Operations by `seq_id`, which begins at 1 and has no gaps."""

    def __init__(self, *, max_waiting: int, max_waiting_bytes: int) -> None:
        """None yet; so many may wait for one that has not come, and it may take so much memory."""
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self.next_seq_id = 1
        """The one that everything behind it waits for."""
        self.waiting_bytes = 0
        self._waiting: dict[int, tuple[Item, int]] = {}
        self._digests: dict[int, bytes] = {}

    def knows(self, seq_id: int) -> bool:
        """Whether an operation is here or was here."""
        return seq_id < self.next_seq_id or seq_id in self._waiting

    def place(self, seq_id: int, digest: bytes, item: Item, *, size: int, room: bool) -> Placement:
        """Take an operation in, unless it is here or was here; `digest` tells it from others.

        The one that all others wait for is always taken in. Another one takes `size` bytes, and is taken in where
        there is `room` among those of other models.
        """
        if self.knows(seq_id):
            known = self._digests.get(seq_id, digest)
            return Placement.REPEAT if known == digest else Placement.CONFLICT
        if seq_id > self.next_seq_id and not (room and self._has_room(size)):
            return Placement.FULL
        self._waiting[seq_id] = (item, size)
        self.waiting_bytes += size
        self._digests[seq_id] = digest
        return Placement.NEW

    def leave(self) -> Iterator[Item]:
        """What can go now, in order."""
        while self.next_seq_id in self._waiting:
            item, size = self._waiting.pop(self.next_seq_id)
            self.waiting_bytes -= size
            self._digests.pop(self.next_seq_id - REMEMBERED, None)
            self.next_seq_id += 1
            yield item

    def abandon(self) -> list[Item]:
        """Everything that still waits, which will not go any more."""
        waiting = [self._waiting[seq_id][0] for seq_id in sorted(self._waiting)]
        self._waiting.clear()
        self.waiting_bytes = 0
        return waiting

    def _has_room(self, size: int) -> bool:
        return len(self._waiting) < self._max_waiting and self.waiting_bytes + size <= self._max_waiting_bytes

    @property
    def waiting(self) -> int:
        """How many wait for an earlier one."""
        return len(self._waiting)
