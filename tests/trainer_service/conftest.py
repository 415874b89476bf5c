"""Fixtures that the suites of the service share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers checkpoint of random weights."""
    from engine.tiny_models import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("tiny"))
