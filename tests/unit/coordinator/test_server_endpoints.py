"""What the server's own environment tells its jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.server.coordinator.launch import fetching_environment
from trainmaster.server.settings.settings import Settings


def test_jobs_fetch_from_the_hub_that_the_server_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data_dir=tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.test")
    assert fetching_environment(settings)["HF_ENDPOINT"] == "https://mirror.test"
    monkeypatch.delenv("HF_ENDPOINT")
    assert "HF_ENDPOINT" not in fetching_environment(settings)
