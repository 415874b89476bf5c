"""Shards the engine's model over the ranks, by PyTorch's FSDP2.

Each layer is gathered when it is computed, in the type that it is computed in, and freed after that; the next one is
gathered meanwhile. Its gradients are summed in 32 bits, each rank getting those of its shard, while the layer before is
computed. The container has the shards for parameters: optimizer, checkpoints and export know nothing else. An adapter's
factors are not part of the layers and stay on every rank: they are few.
"""

from __future__ import annotations

import heapq
import itertools
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from trainmaster.training.loop.loss_module import LossModule
from trainmaster.training.loop.peers import Peers


class ShardedModules:
    """Modules whose weights are gathered when they are called."""

    def __init__(self, modules: Sequence[FSDPModule], *, gathered_bytes: int) -> None:
        """`gathered_bytes`: what weights that are gathered take at most in a pass, with their gradients."""
        self._modules = modules
        self.gathered_bytes = gathered_bytes

    def free(self) -> None:
        """Have the next call gather the weights again: an evaluation leaves those of the outermost modules gathered."""
        for module in self._modules:
            module.reshard()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    peers: Peers
    reshard_after_forward: bool = True
    """Free a layer's weights after the forward pass, and gather them again for the backward pass."""

    def shard(self, losses: LossModule, container: nn.Module, dtype: torch.dtype) -> ShardedModules:
        """Replace the weights by this rank's shards, in the container, too. `dtype`: the one that is computed in."""
        # On a CPU, products are views. Nothing is written to them.
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
        mesh = init_device_mesh(self.peers.device.type, (self.peers.count,))
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.promote_types(dtype, torch.float32), cast_forward_inputs=False
        )
        owners = defaultdict(list)
        for owner in container.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                owners[id(parameter)].append((owner, name))

        def part(module: nn.Module, *, frees: bool) -> FSDPModule:
            whole = dict(module.named_parameters())
            sharded = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)
            for path, parameter in module.named_parameters():
                if parameter is not whole[path]:
                    for owner, name in owners[id(whole[path])]:
                        setattr(owner, name, parameter)
            # A loss is divided by the trained tokens of all ranks. gloo has no sums with a factor.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            return sharded

        gathered_bytes = self._gathered_bytes(losses, dtype)
        layers = [part(layer, frees=self.reshard_after_forward) for layer in losses.body.layers]
        for layer, following in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
        # The backward pass begins with the head. With the rest: the embeddings, which may be the head's weights.
        heads = [] if losses.tied else [part(losses.head, frees=False)]
        sharded = [*layers, *heads, part(losses, frees=False)]
        return ShardedModules(sharded, gathered_bytes=gathered_bytes)

    def _gathered_bytes(self, losses: LossModule, dtype: torch.dtype) -> int:
        """Of the weights outside of the layers, and of three layers: in work, gathered next, and summed."""
        wide = torch.promote_types(dtype, torch.float32).itemsize
        weights = [dtype.itemsize * _count(layer.parameters()) for layer in losses.body.layers]
        # Gradients as they are computed, and as they are summed.
        gradients = [(dtype.itemsize + wide) * _count(_trained(layer)) for layer in losses.body.layers]
        outside = dtype.itemsize * _count(losses.parameters()) - sum(weights)
        outside += (dtype.itemsize + wide) * _count(_trained(losses)) - sum(gradients)
        layers = heapq.nlargest(3, weights) if self.reshard_after_forward else weights
        return outside + sum(layers) + sum(heapq.nlargest(3, gradients))


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters() if each.requires_grad]


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(each.numel() for each in parameters)
