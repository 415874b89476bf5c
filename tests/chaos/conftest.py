"""A ground for each test, and nothing left on it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ground import Ground

from memory_disk import directory_in_memory


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: hundreds of servers commit there."""
    with directory_in_memory() as directory:
        yield directory


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    """Where a test's servers live and die."""
    ground = Ground(tmp_path)
    yield ground
    ground.clean_up()
