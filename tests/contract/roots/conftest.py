from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.jobs.roots import Root, open_root


@pytest.fixture(params=["directory", "s3"])
def root_uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a new, empty root is; what object stores keep on this machine lies below the test's own directory."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    if request.param == "directory":
        return str(tmp_path / "root")
    return str(request.getfixturevalue("s3_root"))


@pytest.fixture
def root(root_uri: str) -> Root:
    """A new, empty root of each kind."""
    return open_root(root_uri)
