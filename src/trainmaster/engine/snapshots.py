"""Weights as they were at one moment: what is sampled from and exported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmaster.engine.adapters import Adapter
    from trainmaster.engine.model import Transformer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """A model's weights as they were when it was taken: no step of training changes them.

    Two snapshots are the same only if they are one: what batches by weights may use them as keys.
    """

    transformer: Transformer
    """The base model itself, where an adapter or nothing is trained beside it; else a copy of the trained weights."""
    adapter: Adapter | None = None
    """A copy of the trained adapter."""
