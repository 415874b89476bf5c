"""Ranks on machines that share no file system save together, through the store where the checkpoint will be."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from forked_ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from served_attempt import ServedAttempt, served_attempt
from trainmaster.jobs import rng
from trainmaster.jobs.checkpoint_saver import SaveError, Saver
from trainmaster.jobs.process import current_process
from trainmaster.jobs.roots import LocalRoot, open_root
from trainmaster.jobs.trees import TreePlan
from trainmaster.protocol import environment

WHOLE = torch.arange(24, dtype=torch.float32).view(6, 4)


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedAttempt]:
    (tmp_path / "world").mkdir()
    with served_attempt(tmp_path / "world") as attempt:
        for name, value in attempt.environment.items():
            monkeypatch.setenv(name, value)
        yield attempt


@pytest.fixture
def uri(attempt: ServedAttempt) -> str:
    """An empty root that all machines reach."""
    return attempt.checkpoints


def be_a_machine(rank: int, directory: Path) -> None:
    """Give a rank a cache of its own, and hide the directories of the others: it is a process of its own."""
    own = directory / f"machine-{rank}"
    own.mkdir(parents=True, exist_ok=True)
    os.environ[environment.CACHE_DIR] = str(own)
    is_dir = Path.is_dir

    def sees(path: Path) -> bool:
        hidden = path.is_relative_to(directory) and not path.is_relative_to(own)
        return not hidden and is_dir(path)

    Path.is_dir = sees  # type: ignore[assignment,method-assign]


def tree_of(rank_count: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (rank_count,))
    return {"sharded": distribute_tensor(WHOLE, mesh, [Shard(0)]), "whole": torch.arange(3), "step": 5}


def save(uri: str, directory: Path, count: int, rel_path: str = "checkpoint-5", times: int = 1) -> list[Any]:
    def work(rank: int) -> str:
        be_a_machine(rank, directory)
        with Saver(open_root(uri), current_process()) as saver:
            for _ in range(times):
                saver.save(tree_of(count), rel_path=rel_path, step=5)
                saved = saver.wait()
        assert saved is not None
        return saved.rel_path

    return run_ranks(count, work, directory / "saving")


def load(uri: str, directory: Path, count: int, rel_path: str = "checkpoint-5") -> None:
    def work(rank: int) -> None:
        be_a_machine(rank, directory)
        template = {**tree_of(count), "sharded": torch.zeros_like(tree_of(count)["sharded"])}
        with Saver(open_root(uri), current_process()) as saver:
            found = saver.load(rel_path, template).tree["sharded"]
        assert isinstance(found, DTensor)
        assert found.full_tensor().equal(WHOLE)

    run_ranks(count, work, directory / f"loading-{count}")


def test_machines_without_a_shared_directory_save_together_and_others_resume(uri: str, tmp_path: Path) -> None:
    assert save(uri, tmp_path / "of", 2) == ["checkpoint-5"] * 2
    root = open_root(uri)
    manifest = root.verify("checkpoint-5")
    names = [file.path for file in manifest.files]
    assert {rng.file_of(0), rng.file_of(1)} < set(names)
    assert [name for name in names if name.startswith("sharded/rank-00001")]
    assert not [name for name in names if ".part-" in name]
    assert manifest.world_size == 2
    load(uri, tmp_path / "of", 2)
    load(uri, tmp_path / "of", 1)
    load(uri, tmp_path / "of", 3)
    assert [path for path in (tmp_path / "of").glob("machine-*/**/*") if path.is_file()] == []


def test_second_save_to_a_path_has_the_parts_of_all_machines_too(uri: str, tmp_path: Path) -> None:
    assert save(uri, tmp_path / "of", 2, times=2) == ["checkpoint-5-attempt-0"] * 2
    root = open_root(uri)
    assert sorted(root.committed()) == ["checkpoint-5", "checkpoint-5-attempt-0"]
    for rel_path in root.committed():
        assert [file for file in root.verify(rel_path).files if file.path.startswith("sharded/rank-00001")]


def test_part_that_fails_on_another_machine_fails_the_save(attempt: ServedAttempt, tmp_path: Path) -> None:
    def work(rank: int) -> str:
        be_a_machine(rank, tmp_path / "of")
        start = TreePlan.start
        with Saver(open_root(attempt.checkpoints), current_process()) as saver:
            if rank == 1:
                TreePlan.start = _raise  # type: ignore[assignment,method-assign]
            try:
                saver.save(tree_of(2), rel_path="c-1", step=1)
            except MemoryError:
                TreePlan.start = start  # type: ignore[method-assign]
            try:
                saver.wait()
            except Exception as error:
                return str(error)
        return ""

    said = run_ranks(2, work, tmp_path / "ranks")
    assert all("no memory" in words for words in said)
    assert open_root(attempt.checkpoints).committed() == []


def _raise(*_: Any) -> None:
    raise MemoryError("no memory")


def test_machines_that_share_no_directory_cannot_save_to_one(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        be_a_machine(rank, tmp_path / "of")
        try:
            Saver(LocalRoot(tmp_path / "of" / "machine-0" / "root"), current_process()).save({}, rel_path="c", step=1)
        except SaveError as error:
            return str(error)
        return ""

    assert all("need a directory that they share" in words for words in run_ranks(2, work, tmp_path / "ranks"))
