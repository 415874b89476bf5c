"""Amounts of cores and of bytes as people write them: `2`, `500m`, `4Gi`."""

from __future__ import annotations

_UNITS = (
    ("Ki", 2.0**10), ("Mi", 2.0**20), ("Gi", 2.0**30), ("Ti", 2.0**40),
    ("m", 1e-3), ("k", 1e3), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12),
)  # fmt: skip


def quantity(text: str) -> float:
    """What a quantity says.

    >>> quantity("500m"), quantity("2"), quantity("1.5Gi")
    (0.5, 2.0, 1610612736.0)
    """
    for unit, factor in _UNITS:
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text)
