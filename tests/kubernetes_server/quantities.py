"""Resource quantities: `500m`, `64Mi`, `4`, `1e3`."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

_FACTORS = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15),
    "E": Decimal(10**18), "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40),
    "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip
_PATTERN = re.compile(r"^([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([numkMGTPE]|[KMGTPE]i)?$")


def quantity(value: Any) -> Decimal:
    """The number that a quantity says.

    Raises:
        ValueError: it is no quantity.
    """
    found = _PATTERN.match(str(value))
    if found is None:
        raise ValueError(str(value))
    return Decimal(found[1]) * _FACTORS[found[2] or ""]
