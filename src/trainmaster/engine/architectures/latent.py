"""Attention whose keys and values are read from a latent vector of few numbers for each token (MLA)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    query_rank: int | None
    """Of the vector that queries are read from; None: they are read from the hidden state."""
    rank: int
    """Of the vector that keys and values of all heads are read from."""
    plain_width: int
    """The part of each query and key that positions do not turn; it comes first."""
    turned_width: int
    """The part that positions turn. All heads share that of the key."""
    value_width: int

    @property
    def key_width(self) -> int:
        return self.plain_width + self.turned_width
