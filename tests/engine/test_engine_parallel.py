"""Two real ranks against one, and what happens when one of them fails."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_checkpoint

from forked_services import ForkedRank
from trainmaster.engine.parallel import joined, parted
from trainmaster.jobs import trees


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("parallel") / "qwen3")


def start(checkpoint: Path, output: Path, scenario: str, size: int) -> list[ForkedRank]:
    output.mkdir()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    joined = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        ForkedRank(
            "parallel_ranks",
            [str(checkpoint), str(output), scenario],
            env={**os.environ, **joined, "RANK": str(rank)},
            log=output / f"log-{rank}",
        )
        for rank in range(size)
    ]


def ended(processes: list[ForkedRank], output: Path) -> list[tuple[int, str]]:
    """Exit code and errors of each; none may hang."""
    try:
        codes = [each.wait() for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
    return [(code, (output / f"log-{rank}").read_text()) for rank, code in enumerate(codes)]


def found_by(checkpoint: Path, output: Path, scenario: str, size: int) -> list[Any]:
    for code, errors in ended(start(checkpoint, output, scenario, size), output):
        assert code == 0, errors
    found: list[Any] = json.loads((output / "found.json").read_text())
    return found


def assert_close(ours: Any, theirs: Any, tolerance: float) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_close(ours[key], theirs[key], tolerance)
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_close(mine, other, tolerance)
    elif isinstance(ours, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    else:
        assert ours == theirs


def test_two_ranks_train_as_one_does(checkpoint: Path, tmp_path: Path) -> None:
    one = found_by(checkpoint, tmp_path / "one", "train", 1)
    two = found_by(checkpoint, tmp_path / "two", "train", 2)
    # Before the first step no sum over ranks was taken: not a bit differs.
    assert two[0] == one[0]
    assert two[0][2] == "there is no model 'nobody'"
    assert_close(two, one, 2e-5)
    for model_id in ("lora", "full"):
        saved = [trees.read(tmp_path / name / model_id) for name in ("two", "one")]
        assert_close(*saved, 2e-5)
    assert saved[0]["optimizer"]["steps"] == 3
    with_gradients = trees.read(tmp_path / "two" / "lora")["gradients"]
    assert (with_gradients["sequences"], with_gradients["loss_tokens"]) == (3, 60)
    # A saved state goes on as the model that it is of.
    full_passes, full, full_again, again, lora, after = two[-6:]
    assert full_passes[0] == full_passes[1]
    assert full == full_again
    assert_close(again, lora, 1e-6)
    np.testing.assert_allclose(after[0]["logprobs"], after[1]["logprobs"], rtol=1e-5)


def test_tensors_of_a_command_are_not_among_its_bytes() -> None:
    large = torch.arange(3_000_000, dtype=torch.float32)
    state = {"weights": {"a": large, "b": torch.nn.Parameter(large[:6].view(2, 3))}, "steps": 3, "none": torch.empty(0)}
    described, tensors = parted(("load_state", ("m", state), {"optimizer": True}))
    assert len(described) < 1_000
    assert [each.nbytes for each in tensors] == [12_000_000, 24, 0]
    (name, (model_id, received), options), places = joined(described)
    assert (name, model_id, options, received["steps"]) == ("load_state", "m", {"optimizer": True}, 3)
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor.detach())
    assert_close(received["weights"]["a"], large, 0)
    assert torch.equal(received["weights"]["b"], large[:6].view(2, 3))


def test_command_that_fails_in_one_rank_fails_in_all(checkpoint: Path, tmp_path: Path) -> None:
    found = found_by(checkpoint, tmp_path / "two", "fail_in_one_rank", 2)
    [[failed, fine], step, created, refused, no_gradients, loaded, gone, models, results] = found
    assert failed == "RuntimeError: this rank broke"
    assert fine["metrics"]["loss_tokens:sum"] == 44
    # One request's gradients, not those of the one that failed.
    assert step["grad_norm"] > 0
    dropped = "; the model is dropped in all ranks: create it again from a saved state"
    assert created == "rank 1: RuntimeError: this rank has no room" + dropped
    assert refused == "there is a model 'lora' already"
    assert no_gradients == {"skipped_without_gradients": 1.0, "grad_norm": 0.0}
    assert loaded == "rank 1: RuntimeError: this rank cannot load" + dropped
    assert gone == "there is no model 'lora'"
    assert models == ["new"]
    assert results == 1


def test_rank_that_dies_leaves_no_other_hanging(checkpoint: Path, tmp_path: Path) -> None:
    (first, errors), (second, _) = ended(start(checkpoint, tmp_path / "two", "die", 2), tmp_path / "two")
    assert second == 7
    assert first != 0
    assert "onnection" in errors or "closed" in errors
    assert not (tmp_path / "two" / "found.json").exists()


def test_ranks_that_lose_their_leader_end(checkpoint: Path, tmp_path: Path) -> None:
    (first, _), (second, _) = ended(start(checkpoint, tmp_path / "two", "leave_without_a_word", 2), tmp_path / "two")
    assert first == 7
    assert second not in (0, 7)
