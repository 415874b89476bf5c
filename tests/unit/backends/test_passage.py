from __future__ import annotations

import stat
from pathlib import Path

import pytest

from trainmaster.backends.local import grant_traversal


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def make(directory: Path, **modes: int) -> None:
    """Make files and, where the name ends in `_d`, directories of these modes."""
    for name, wanted in modes.items():
        path = directory / name.removesuffix("_d")
        path.mkdir() if name.endswith("_d") else path.touch()
        path.chmod(wanted)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    directory.mkdir(mode=0o700)
    make(directory, blobs_d=0o755, mine=0o644, artifacts_d=0o755, runs_d=0o755)
    (directory / "trainmaster.db").touch(mode=0o644)
    return directory


def open_both(data: Path) -> None:
    grant_traversal(data, [data / "runs", data / "artifacts"])


def test_closed_data_directory_is_opened_and_all_in_it_is_closed(data: Path) -> None:
    make(data / "artifacts", job_d=0o755, theirs_d=0o711)
    open_both(data)
    assert [mode(path) for path in (data, data / "runs", data / "artifacts")] == [0o711] * 3
    assert [mode(data / name) for name in ("trainmaster.db", "blobs", "mine")] == [0o600, 0o700, 0o600]
    assert mode(data / "artifacts" / "job") == 0o700
    assert mode(data / "artifacts" / "theirs") == 0o711  # opened by whoever runs the job


def test_data_directory_that_was_open_keeps_what_is_not_ours(data: Path) -> None:
    data.chmod(0o755)
    (data / "container.used").touch(mode=0o644)
    open_both(data)
    assert [mode(data / name) for name in ("trainmaster.db", "blobs", "mine")] == [0o600, 0o700, 0o644]
    assert mode(data / "container.used") == 0o600  # names the socket of the container engine


def test_what_was_opened_once_is_left_alone(data: Path) -> None:
    open_both(data)
    make(data / "artifacts", job_d=0o750)
    open_both(data)
    assert mode(data / "artifacts" / "job") == 0o750


def test_link_is_not_followed(data: Path, tmp_path: Path) -> None:
    make(tmp_path, elsewhere=0o644)
    (data / "artifacts" / "link").symlink_to(tmp_path / "elsewhere")
    open_both(data)
    assert mode(tmp_path / "elsewhere") == 0o644


def test_data_directory_stays_closed_where_nothing_lies_in_it(data: Path, tmp_path: Path) -> None:
    grant_traversal(data, [tmp_path / "shared" / "runs"])
    assert (mode(data), mode(tmp_path / "shared" / "runs")) == (0o700, 0o711)
