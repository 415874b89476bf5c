"""One of two ranks that compute models of transformers with shards: run as a program, it fails where a copy differs.

`python sharded_ranks.py DIRECTORY`, with a checkpoint of each kind below, and RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT set.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from tiny_models import random_tokens, reference
from torch.distributed.tensor import DTensor

from trainmaster.training.data.dataset import IGNORED
from trainmaster.training.loop.batches import Batch, Rows
from trainmaster.training.loop.engine_model import EngineModel, engine_config
from trainmaster.training.loop.objectives import NextTokens
from trainmaster.training.loop.peers import Peers
from trainmaster.training.loop.sharding import Sharding
from trainmaster.training.loop.weights import TrainedWeights

LENGTHS = ((19, 1, 40), (7, 33))
DIVISOR = torch.tensor(31.0, dtype=torch.float64)


def batch_of(rank: int) -> Batch:
    tokens = [random_tokens(length, 10 * rank + seed).tolist() for seed, length in enumerate(LENGTHS[rank])]
    labels = [[token if place % 3 else IGNORED for place, token in enumerate(row)] for row in tokens]
    return Rows(Dataset.from_dict({"input_ids": tokens, "labels": labels})).batch(np.arange(len(tokens)))


def model_of(directory: Path, peers: Peers, *, adapter: bool, sharded: bool) -> EngineModel:
    model = reference(directory, dtype=torch.float32)
    options = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(1)
    return EngineModel(
        model,
        engine_config(model.config, str(directory)),
        options if adapter else None,
        TrainedWeights(peers, single=False),
        NextTokens(),
        device=peers.device,
        dtype=torch.float32,
        recompute=float(adapter),
        sharding=Sharding(peers=peers) if sharded else None,
    )


def stepped(model: EngineModel, batches: list[Batch]) -> tuple[dict[str, torch.Tensor], float]:
    """How a step over some batches, of all ranks, changes the weights; and the norm of the gradients."""
    before = weights_of(model)
    for number, batch in enumerate(batches, start=1):
        model.weights.backward(model.losses(batch, DIVISOR)[0], last=number == len(batches))
    trained = [each for each in model.container.parameters() if each.requires_grad]
    norm = model.step(torch.optim.SGD(trained, lr=0.5), max_norm=float("inf"))
    return {name: after - before[name] for name, after in weights_of(model).items()}, float(norm)


def weights_of(model: EngineModel) -> dict[str, torch.Tensor]:
    trained = {name: each.detach() for name, each in model.container.named_parameters() if each.requires_grad}
    return {
        name: each.full_tensor().clone() if isinstance(each, DTensor) else each.clone()
        for name, each in trained.items()
    }


def main() -> None:
    peers = Peers.join("gloo")
    alone = Peers(index=0, count=1, device=peers.device)
    for directory in sorted(Path(sys.argv[1]).iterdir()):
        for adapter in (False, True):
            theirs, norm = stepped(
                model_of(directory, alone, adapter=adapter, sharded=False), [batch_of(0), batch_of(1)]
            )
            ours, own_norm = stepped(model_of(directory, peers, adapter=adapter, sharded=True), [batch_of(peers.index)])
            assert ours.keys() == theirs.keys()
            assert any(each.any() for each in theirs.values())
            where = f"{directory.name}, {'adapter' if adapter else 'all'}"
            torch.testing.assert_close(own_norm, norm, rtol=1e-4, atol=0, msg=where)
            for name, change in theirs.items():
                atol = max(2e-6, 1e-4 * float(change.abs().max()))
                torch.testing.assert_close(ours[name], change, rtol=1e-3, atol=atol, msg=f"{where}: {name}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
