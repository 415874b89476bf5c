"""What starts the worker of a node where Trainmaster is not installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainmaster.worker import bootstrap


def test_workers_that_share_a_directory_and_have_the_same_process_id_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "worker.pyz"
    replace = os.replace

    def other_is_faster(draft: str, path: str) -> None:
        monkeypatch.setattr(os, "replace", replace)
        bootstrap.write(path, b"worker")
        replace(draft, path)

    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(os, "replace", other_is_faster)
    bootstrap.write(str(target), b"worker")
    assert target.read_bytes() == b"worker"
    assert os.listdir(tmp_path) == ["worker.pyz"]
