"""A ground for each test, and nothing left on it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ground import Ground


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    """Where a test's servers live and die."""
    ground = Ground(tmp_path)
    yield ground
    ground.clean_up()
