"""Amounts as people write them."""

from __future__ import annotations

from typing import get_args

import pytest

from trainmaster.server.core.fields import Matches
from trainmaster.server.core.resources import quantity
from trainmaster.server.core.workloads.initializers import Quantity

UNITS = {
    "m": 1e-3, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
    "Ki": 1024, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4,
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), [("250m", 0.25), ("2", 2.0), ("1Gi", 2.0**30), ("3M", 3e6), ("1.5", 1.5)])
def test_quantity_is_read(text: str, value: float) -> None:
    assert quantity(text) == value


def test_every_unit_that_a_job_may_write_is_read() -> None:
    *_, form = (part for part in get_args(Quantity) if isinstance(part, Matches))
    named = form.pattern.rpartition("(")[2].removesuffix(")?").split("|")
    assert {unit: quantity(f"1.5{unit}") for unit in named} == pytest.approx({n: 1.5 * UNITS[n] for n in UNITS})
