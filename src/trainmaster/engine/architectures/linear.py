"""Layers whose tokens are mixed by a recurrent state instead of attention: the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    layers: tuple[bool, ...]
    """For each layer, whether it has a recurrent state; others attend."""
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int
    """How many of the last rows a row is convolved with, including itself."""
    by_key_head: bool = False
    """Whether queries, keys, values and gates are one product, with the parts of each key head together."""

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        return self.value_heads * self.value_width

    @property
    def mixed(self) -> int:
        """Queries, keys and values of a row."""
        return 2 * self.keys + self.values
