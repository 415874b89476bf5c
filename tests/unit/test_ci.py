"""CI runs every test that it is set up for: without a container engine it fails, where others skip."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from container_engine import REQUIRED, missing

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A PATH on which there is neither an engine nor anything to install one with."""
    (tmp_path / "id").symlink_to("/usr/bin/id")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(REQUIRED, raising=False)
    return str(tmp_path)


def test_missing_engine_is_a_reason_to_skip_and_in_ci_an_error(bare_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing()
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(AssertionError, match=r"podman|root"):
        missing()


def test_setup_without_an_engine_fails_in_ci_alone(bare_path: str) -> None:
    def set_up(**environment: str) -> subprocess.CompletedProcess[str]:
        command = ["/bin/sh", str(ROOT / "scripts" / "containers.sh")]
        return subprocess.run(command, env={"PATH": bare_path, **environment}, capture_output=True, text=True)

    for ended in (set_up(), set_up(**{REQUIRED: "1"})):
        assert "no container engine: install podman" in ended.stderr
    assert (set_up().returncode, set_up(**{REQUIRED: "1"}).returncode) == (0, 1)
    assert f"{REQUIRED}=1 REQUIRE_SLURM=1 make test" in (ROOT / ".ci" / "run").read_text()
