"""Models of every architecture, sharded over two ranks: a step changes their weights as it does on one rank."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from tiny_models import KINDS, make_checkpoint

from forked_services import ForkedRank
from trainmaster.engine.config import ModelConfig


@pytest.mark.long  # minutes, where others compute, too
def test_every_architecture_steps_with_shards_as_it_does_whole(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    kinds = {model_type: kind for kind, (model_type, _) in KINDS.items()}
    made = [make_checkpoint(checkpoints / kind, kind) for kind in ("qwen3_untied", *kinds.values())]
    for each in made:
        if ModelConfig.read(each).mixture is not None:
            each.rename(tmp_path / each.name)  # trainings do not have them
    assert len(list(checkpoints.iterdir())) > 8
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    joined = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    logs = [tmp_path / f"log-{rank}" for rank in range(2)]
    ranks = [
        ForkedRank("sharded_ranks", [str(checkpoints)], env={**os.environ, **joined, "RANK": str(rank)}, log=log)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [each.wait() for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert codes == [0, 0], "".join(log.read_text() for log in logs)
