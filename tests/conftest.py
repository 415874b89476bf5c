"""Fixtures that several suites share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from real_server import RealServer, running


@pytest.fixture
def toy_kind() -> Iterator[Any]:
    """A workload kind that nothing in the package knows: it greets, in so many words, and is gone after the test."""
    from toy_kind import ToyKind
    from trainmaster.core.workloads import register, unregister

    kind = ToyKind()
    register(kind)
    yield kind
    unregister(kind.KIND)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RealServer]:
    """A real server process on an empty data directory."""
    with running(tmp_path / "data", "--data-root", str(tmp_path)) as started:
        yield started
