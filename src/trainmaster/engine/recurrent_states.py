"""The states of recurrent layers for running requests: one place for each sequence, given out with its pages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from trainmaster.engine.architectures.linear import LinearAttention
from trainmaster.engine.delta_rule import Past


class RecurrentStates:
    """Grows as sequences begin; what they give back is used again."""

    def __init__(self, linear: LinearAttention, device: torch.device, dtype: torch.dtype) -> None:
        self._pasts = [Past.none(linear, 1, device, dtype) for _ in range(sum(linear.layers))]
        self._places: dict[Hashable, int] = {}
        self._free = [0]

    @classmethod
    def like(cls, linear: LinearAttention, weight: Tensor) -> RecurrentStates:
        """For a model with such weights; the states have at least 32 bits."""
        wide = torch.float64 if weight.device.type == "cpu" and weight.dtype == torch.float32 else torch.float32
        return cls(linear, weight.device, torch.promote_types(wide, weight.dtype))

    @property
    def bytes_each(self) -> int:
        """Of one sequence."""
        return sum(past.rows[0].nbytes + past.state[0].nbytes for past in self._pasts)

    def place(self, rooms: Sequence[Hashable], start: int) -> int:
        """The place of a sequence, by its rooms in the cache, whose tokens from `start` on are to be computed.

        A sequence that goes on from a prompt, whose rooms come first, begins with the prompt's state.
        """
        *before, own = rooms
        if own in self._places:
            place = self._places[own]
            if start:
                return place
        else:
            if not self._free:
                self._grow()
            place = self._places[own] = self._free.pop()
        for past in self._pasts:
            for tensor in (past.rows, past.state):
                if before:
                    tensor[place] = tensor[self._places[before[-1]]]
                else:
                    tensor[place] = 0
        return place

    def give_back(self, room: Hashable) -> None:
        if room in self._places:
            self._free.append(self._places.pop(room))

    def past(self, layer: int, places: Sequence[int]) -> Past:
        past = self._pasts[layer]
        return Past(past.rows[places], past.state[places])

    def keep(self, layer: int, places: Sequence[int], past: Past) -> None:
        own = self._pasts[layer]
        own.rows[places], own.state[places] = past.rows, past.state

    def _grow(self) -> None:
        count = len(self._pasts[0].rows)
        self._free = list(range(2 * count - 1, count - 1, -1))
        self._pasts = [
            Past(torch.cat([past.rows, past.rows]), torch.cat([past.state, past.state])) for past in self._pasts
        ]
