"""The DeepSpeed runtime with DeepSpeed itself, which is a package of the job's own. It compiles a part of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_server import running
from trainmaster.trainer import CustomTrainer, ServerBackendConfig, TrainerClient

PATIENCE_S = 900


def train(steps: int) -> list[float]:
    import deepspeed
    import torch

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for _ in range(steps):
        # The second rank has other data: without an exchange the ranks would part.
        loss = engine(torch.full((2, 4), 1.0 + engine.global_rank)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = [torch.zeros(5) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(weights, torch.cat([part.detach().flatten() for part in model.parameters()]))
    assert len(weights) == 2
    assert torch.equal(weights[0], weights[1])
    return losses


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S)
def test_ranks_of_two_nodes_train_one_model_without_a_launcher(tmp_path: Path) -> None:
    with (
        running(tmp_path / "data") as server,
        TrainerClient(ServerBackendConfig(url=server.url, api_key=server.key)) as client,
    ):
        trainer = CustomTrainer(
            func=train,
            func_args={"steps": 4},
            packages_to_install=["deepspeed>=0.17"],
            pip_index_urls=[],
            num_nodes=2,
            env={"OMP_NUM_THREADS": "1"},
        )
        job = client.train(runtime="deepspeed-distributed", trainer=trainer)
        client.wait_for_job_status(job, timeout=PATIENCE_S)
        losses = client.get_job_result(job)
        assert losses[-1] < losses[0]
