"""What several ranks check together; called in forked processes that `together` starts, and fails by raising."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def sums_begin_before_the_backward_pass_ends() -> None:
    """Sums are those of all ranks' gradients, all but the last begin while gradients are missing, none before."""
    import torch
    from torch import nn

    from trainmaster.training.loop import gradient_sums
    from trainmaster.training.loop.weights import TrainedWeights

    gradient_sums.BUCKET_BYTES = 3 * 8 * 8 * 4  # of three layers of the ten
    with _ranks() as peers:
        torch.manual_seed(0)
        layers = [nn.Parameter(torch.randn(8, 8) / 4) for _ in range(10)]
        weights = TrainedWeights(peers, single=False)
        weights.others += layers
        events: list[str] = []
        layers[0].register_hook(lambda _: events.append("first layer"))
        for step in range(3):
            batches = [torch.randn(4, 8, generator=_drawn(peers.index, step, number)) for number in range(2)]
            with _sums_noted(events):
                for number, batch in enumerate(batches):
                    weights.backward(_loss(layers, batch), last=number == 1)
                events.append("end")
                weights.step(torch.optim.SGD(layers, lr=0.0), max_norm=float("inf"))
            assert events == ["first layer", "sum", "sum", "sum", "first layer", "sum", "end"], events
            events.clear()


def sums_are_those_of_all_ranks() -> None:
    """Of 32 bits, of 16-bit copies, and of parameters without a gradient; with accumulation, too."""
    import torch
    from torch import nn

    from trainmaster.training.loop import gradient_sums
    from trainmaster.training.loop.weights import TrainedWeights

    gradient_sums.BUCKET_BYTES = 500
    with _ranks() as peers:
        torch.manual_seed(0)
        originals = [nn.Parameter(torch.randn(8, 8) / 4) for _ in range(5)]
        plain, unused = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.zeros(3))
        weights = TrainedWeights(peers, single=False)
        copies = [weights.copy_of(each, torch.bfloat16) for each in originals]
        weights.others += [plain, unused]
        expected = []
        for rank in range(2):
            alone = [each.detach().clone().requires_grad_() for each in copies]
            other = plain.detach().clone().requires_grad_()
            total = [torch.zeros(8, 8) for _ in range(6)]
            for number in range(3):
                batch = torch.randn(4, 8, generator=_drawn(rank, 0, number))
                found = torch.autograd.grad(_loss([*alone, other], batch), [*alone, other])
                total = [each + more for each, more in zip(total, found, strict=True)]
            expected.append(total)
        for number in range(3):
            batch = torch.randn(4, 8, generator=_drawn(peers.index, 0, number))
            weights.backward(_loss([*copies, plain], batch), last=number == 2)
        seen: list[torch.Tensor] = []

        class Looking(torch.optim.SGD):
            def step(self, *_: Any) -> None:
                seen.extend(each.grad.clone() for each in (*originals, plain))

        norm = weights.step(Looking([*originals, plain, unused], lr=0.0), max_norm=float("inf"))
        summed = [first + second for first, second in zip(*expected, strict=True)]
        for own, of_all in zip(seen, summed, strict=True):
            assert torch.equal(own, of_all)
        torch.testing.assert_close(norm, torch.linalg.vector_norm(torch.stack([each.norm() for each in summed])))
        assert unused.grad is None


def layers_are_gathered_and_freed(directory: str) -> None:
    """Outside of a batch, each rank holds its shards alone; with reshard_after_forward, also after a layer."""
    import torch
    from torch.distributed.tensor import DTensor
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainmaster.training.loop.engine_model import EngineModel, engine_config
    from trainmaster.training.loop.objectives import NextTokens
    from trainmaster.training.loop.sharding import Sharding
    from trainmaster.training.loop.weights import TrainedWeights

    with _ranks() as peers:
        for frees in (True, False):
            config = engine_config(AutoConfig.from_pretrained(directory), directory)
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            sharded = EngineModel(
                model,
                config,
                None,
                TrainedWeights(peers, single=False),
                NextTokens(),
                device=peers.device,
                dtype=torch.bfloat16,
                recompute=False,
                sharding=Sharding(peers=peers, reshard_after_forward=frees),
            )
            whole = sum(each.numel() for each in sharded.container.parameters())
            # Of two layers and the rest: 2 bytes to compute with, 2 of gradients, and 4 in which these are summed.
            assert sharded._sharded.gathered_bytes == 8 * whole
            assert all(isinstance(each, DTensor) for each in sharded.container.parameters())
            assert sum(each.to_local().numel() for each in sharded.container.parameters()) <= 0.6 * whole
            first = sharded._losses.body.layers[0]
            seen = []
            first.mlp.register_forward_hook(lambda _, __, output: seen.append(output.dtype))  # noqa: B023
            loss = sharded.losses(_batch(), torch.tensor(9.0, dtype=torch.float64))[0]
            assert seen == [torch.bfloat16]
            after = first.mlp.up_proj.weight
            assert isinstance(after, DTensor) is frees
            sharded.weights.backward(loss, last=True)
            assert isinstance(first.mlp.up_proj.weight, DTensor)
            gradients = [each.grad for each in sharded.container.parameters()]
            assert all(isinstance(each, DTensor) and each.dtype == torch.float32 for each in gradients)


def _batch() -> Any:
    import numpy as np
    from datasets import Dataset

    from trainmaster.training.loop.batches import Rows

    tokens = list(range(7, 16))
    return Rows(Dataset.from_dict({"input_ids": [tokens], "labels": [tokens]})).batch(np.arange(1))


def _loss(layers: list[Any], batch: Any) -> Any:
    rows = batch
    for layer in layers:
        rows = (rows.to(layer.dtype) @ layer).tanh()
    return rows.float().square().sum()


def _drawn(*numbers: int) -> Any:
    import torch

    return torch.Generator().manual_seed(sum(number * 100**place for place, number in enumerate(numbers)))


@contextlib.contextmanager
def _sums_noted(events: list[str]) -> Iterator[None]:
    import torch.distributed as dist

    begin = dist.all_reduce

    def noted(*args: Any, **kwargs: Any) -> Any:
        events.append("sum")
        return begin(*args, **kwargs)

    dist.all_reduce = noted
    try:
        yield
    finally:
        dist.all_reduce = begin


@contextlib.contextmanager
def _ranks() -> Iterator[Any]:
    import torch.distributed as dist

    from trainmaster.training.loop.peers import Peers

    yield Peers.join("gloo")
    dist.destroy_process_group()
