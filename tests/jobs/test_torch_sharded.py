"""Tensors that are sharded over ranks: saved by some, read by others, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # imported by the first operation on a DTensor: once here, instead of in every rank
import torch.distributed.fsdp
from checkpoint_files import assert_no_pickle, torch_bytes
from forked_ranks import run_ranks
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from trainmaster.jobs import trees
from trainmaster.jobs.checkpoint import CorruptCheckpointError
from trainmaster.jobs.checkpoint_saver import Saver
from trainmaster.jobs.process import current_process
from trainmaster.jobs.roots import open_root
from trainmaster.jobs.trees import ANYTHING, TreeError, torch_tensors

WHOLE = {
    "even": torch.arange(24, dtype=torch.float32).view(6, 4),
    "uneven": torch.arange(15, dtype=torch.float64).view(5, 3),
    "tiny": torch.arange(1, dtype=torch.int64),
    "half": torch.arange(8).to(torch.bfloat16),
    "columns": torch.arange(12, dtype=torch.float32).view(2, 6),
}
PLACEMENTS = {"columns": Shard(1)}


def _mesh() -> Any:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def _sharded(mesh: Any) -> dict[str, DTensor]:
    return {name: distribute_tensor(whole, mesh, [PLACEMENTS.get(name, Shard(0))]) for name, whole in WHOLE.items()}


def _blank(mesh: Any) -> dict[str, DTensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in _sharded(mesh).items()}


def _assert_whole(found: dict[str, Any]) -> None:
    for name, whole in WHOLE.items():
        value = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        assert torch_bytes(value) == torch_bytes(whole), name


def _save(root: Path, count: int, place: Path) -> None:
    def work(rank: int) -> None:
        with Saver(open_root(root), current_process()) as saver:
            tree = {"sharded": _sharded(_mesh()), "whole": torch.arange(3), "step": 5}
            saver.save(tree, rel_path="checkpoint-5", step=5, metadata={"ranks": count})

    run_ranks(count, work, place)


def _load_sharded(root: Path, count: int, place: Path) -> None:
    def work(rank: int) -> None:
        template = {"sharded": _blank(_mesh()), "whole": torch.zeros(3, dtype=torch.int64), "step": 0}
        with Saver(open_root(root), current_process()) as saver:
            tree, metadata, manifest = saver.load("checkpoint-5", template)
        assert all(isinstance(value, DTensor) for value in tree["sharded"].values())
        _assert_whole(tree["sharded"])
        assert tree["whole"].tolist() == [0, 1, 2]
        assert tree["step"] == manifest.step == 5
        assert metadata["ranks"] == manifest.world_size

    run_ranks(count, work, place)


@pytest.mark.parametrize(("saved_by", "read_by"), [(2, 2), (2, 1), (1, 2), (2, 3)])
def test_sharded_tensors_are_read_by_another_number_of_ranks(saved_by: int, read_by: int, tmp_path: Path) -> None:
    _save(tmp_path / "root", saved_by, tmp_path / "saving")
    assert_no_pickle(tmp_path / "root")
    _load_sharded(tmp_path / "root", read_by, tmp_path / "loading")


def test_sharded_tensors_are_read_whole_without_ranks(tmp_path: Path) -> None:
    _save(tmp_path / "root", 2, tmp_path / "saving")
    with Saver(open_root(tmp_path / "root")) as saver:
        _assert_whole(saver.load("checkpoint-5").tree["sharded"])
        template = {"sharded": {name: torch.zeros_like(whole) for name, whole in WHOLE.items()}}
        _assert_whole(saver.load("checkpoint-5", template, partial=True).tree["sharded"])


def test_whole_tensors_are_read_sharded(tmp_path: Path) -> None:
    with Saver(open_root(tmp_path / "root")) as saver:
        tree = {"sharded": WHOLE, "whole": torch.arange(3), "step": 5}
        saver.save(tree, rel_path="checkpoint-5", step=5, metadata={"ranks": 1})
    _load_sharded(tmp_path / "root", 2, tmp_path / "loading")


def test_files_are_those_of_the_distributed_checkpoint(tmp_path: Path) -> None:
    _save(tmp_path / "root", 2, tmp_path / "saving")
    reader = HuggingFaceStorageReader(str(tmp_path / "root" / "checkpoint-5" / torch_tensors.SHARDED_DIRECTORY))
    known = reader.read_metadata().state_dict_metadata
    assert {name: tuple(found.size) for name, found in known.items()} == {
        f"sharded.{name}": tuple(whole.shape) for name, whole in WHOLE.items()
    }


def test_copies_are_written_once(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        tensor = distribute_tensor(WHOLE["even"], mesh, [Replicate(), Shard(0)])
        with Saver(open_root(tmp_path / "root"), current_process()) as saver:
            saver.save({"x": tensor}, rel_path="c", step=1)
            found = saver.load("c", {"x": torch.zeros_like(tensor)}).tree["x"]
        assert torch_bytes(found.full_tensor()) == torch_bytes(WHOLE["even"])

    run_ranks(4, work, tmp_path / "ranks")
    files = sorted(path.name for path in (tmp_path / "root" / "c" / "sharded").iterdir())
    assert files == ["rank-00000-00000.safetensors", "rank-00001-00000.safetensors"]


def test_partial_sum_is_refused_with_its_path(tmp_path: Path) -> None:
    def work(rank: int) -> str:
        mesh = _mesh()
        tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        try:
            trees.plan({"a": {"b": tensor}}, process=current_process())
        except TreeError as error:
            return str(error)
        return ""

    said = run_ranks(2, work, tmp_path / "ranks")
    assert said == ["a.b: a checkpoint cannot hold a DTensor that is a partial sum: redistribute it first"] * 2


def test_fsdp_training_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Weights, moments and steps of an optimizer over sharded parameters, read into a model that never stepped."""

    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        torch.distributed.fsdp.fully_shard(model, mesh=_mesh())
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any, seed: int) -> None:
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def work(rank: int) -> None:
        model, optimizer = make()
        with Saver(open_root(tmp_path / "root"), current_process()) as saver:
            step(model, optimizer, 1)
            saver.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, rel_path="c", step=1)
            step(model, optimizer, 2)
            expected = {name: value.full_tensor() for name, value in model.state_dict().items()}
            other, its_optimizer = make()
            step(other, its_optimizer, 9)  # so that it has a state to be like
            template = {"model": other.state_dict(), "optimizer": its_optimizer.state_dict()}
            tree = saver.load("c", template, exact=True).tree
        other.load_state_dict(tree["model"])
        its_optimizer.load_state_dict(tree["optimizer"])
        step(other, its_optimizer, 2)
        for name, value in other.state_dict().items():
            assert torch_bytes(value.full_tensor()) == torch_bytes(expected[name]), name

    run_ranks(2, work, tmp_path / "ranks")
    assert_no_pickle(tmp_path / "root")


def test_corrupt_part_is_refused_by_every_rank(tmp_path: Path) -> None:
    _save(tmp_path / "root", 2, tmp_path / "saving")
    path = tmp_path / "root" / "checkpoint-5" / "sharded" / "rank-00001-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    def work(rank: int) -> str:
        template = {"sharded": _blank(_mesh()), "whole": ANYTHING, "step": 0}
        with Saver(open_root(tmp_path / "root"), current_process()) as saver:
            try:
                saver.load("checkpoint-5", template)
            except CorruptCheckpointError as error:
                return str(error)
        return ""

    first, second = run_ranks(2, work, tmp_path / "loading")
    assert first == "checkpoint-5 is corrupt: another rank found a damaged file"
    assert "rank-00001-00000.safetensors" in second


def test_all_ranks_fall_back_to_the_same_checkpoint(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        mine = current_process()
        with Saver(open_root(tmp_path / "root"), mine) as saver:
            for step in (1, 2):
                tree = {"x": distribute_tensor(torch.full((4,), float(step)), _mesh(), [Shard(0)])}
                saver.save(tree, rel_path=f"checkpoint-{step}", step=step)
            saver.wait()
            if rank == 0:
                (tmp_path / "root" / "checkpoint-2" / "sharded" / "rank-00001-00000.safetensors").write_bytes(b"x")
            mine.barrier("damaged")
            found, loaded = saver.load_latest_good({"x": torch.zeros_like(tree["x"])})
            return [found, loaded.tree["x"].full_tensor().tolist()]

    assert run_ranks(2, work, tmp_path / "ranks") == [["checkpoint-1", [1.0] * 4]] * 2
