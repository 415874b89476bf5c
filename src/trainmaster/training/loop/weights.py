"""The trained weights: originals, which checkpoints and the optimizer know, and copies of fewer bits to compute with.

A step's gradients are those of the copies, summed in the originals' type over batches and ranks. Where a step is one
batch of one rank there is nothing to sum: the gradients stay as they are, and are widened a few at a time for the
optimizer, which saves as much memory as the originals have. Several ranks sum the gradients of a step's last batch
while its backward pass runs. The gradients of sharded weights arrive summed, and each rank has its shard of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainmaster.training.loop.gradient_sums import GradientSums
from trainmaster.training.loop.peers import Peers

BUCKET_BYTES = 1 << 28
"""How many gradients are widened at a time."""
_CLIP_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""


class TrainedWeights:
    def __init__(self, peers: Peers, *, single: bool) -> None:
        """`single`: a step is one batch of one rank."""
        self._peers = peers
        self._single = single
        self._originals: list[nn.Parameter] = []
        self._copies: list[nn.Parameter] = []
        self.others: list[nn.Parameter] = []
        """Trained parameters that are computed with as they are, on every rank."""
        self.shards: list[nn.Parameter] = []
        """Trained parameters that are sharded over the ranks."""
        self._sums: GradientSums | None = None

    def copy_of(self, original: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        copy = nn.Parameter(original.detach().to(dtype))
        self._originals.append(original)
        self._copies.append(copy)
        return copy

    @property
    def gradient_bytes(self) -> int:
        """What the gradients of one batch take."""
        whole = sum(each.nbytes for each in (*self._copies, *self.others))
        return whole + sum(each.to_local().nbytes for each in self.shards if isinstance(each, DTensor))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add a loss's gradients to those of the step. `last`: the step has no more losses."""
        if last and self._peers.count > 1:
            if self._sums is None:
                self._sums = self._make_sums()
            self._sums.begin()
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._single:
            self._widen(range(len(self._copies)))

    def step(self, optimizer: Optimizer, *, max_norm: float) -> Tensor:
        """Step the originals by the gradients of all ranks, clipped; returns the norm of these before."""
        if self._sums is not None:
            self._sums.finish()
        norm = self._norm()
        clip = (max_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0)
        _step(optimizer, [*self._originals, *self.others, *self.shards], clip)
        if self._single:
            for places in self._buckets():
                self._widen(places)
                _step(optimizer, [self._originals[place] for place in places], clip)
        return norm

    @torch.no_grad()
    def follow(self) -> None:
        """Have the copies follow their originals, which have changed."""
        if self._copies:
            torch._foreach_copy_(list[Tensor](self._copies), list[Tensor](self._originals))

    def _norm(self) -> Tensor:
        norm = _norm_of(_gradients((*self._copies, *self._originals, *self.others)), self._peers.device)
        if not self.shards:
            return norm
        of_shards = _norm_of(_gradients(self.shards), self._peers.device)
        return (norm.square() + self._peers.sum(of_shards.square())).sqrt()

    def _make_sums(self) -> GradientSums:
        places = {copy: place for place, copy in enumerate(self._copies)}

        def gradient_of(parameter: nn.Parameter) -> Tensor | None:
            if (place := places.get(parameter)) is None:
                return parameter.grad
            self._widen(range(place, place + 1))
            return self._originals[place].grad

        return GradientSums([*self._copies, *self.others], gradient_of)

    @torch.no_grad()
    def _widen(self, places: range) -> None:
        """Add gradients of copies to those of their originals."""
        for place in places:
            original, copy = self._originals[place], self._copies[place]
            if copy.grad is None:
                continue
            if original.grad is None:
                original.grad = copy.grad.to(original.dtype)
            else:
                original.grad += copy.grad
            copy.grad = None

    def _buckets(self) -> Iterator[range]:
        start = size = 0
        for place, original in enumerate(self._originals):
            if size and size + original.nbytes > BUCKET_BYTES:
                yield range(start, place)
                start, size = place, 0
            size += original.nbytes
        yield range(start, len(self._originals))


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients that are there, of sharded ones this rank's shards."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    return [each.to_local() if isinstance(each, DTensor) else each for each in gradients]


def _norm_of(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    if not (parts := [each for each in gradients if each.numel()]):
        return torch.zeros((), device=device)
    norms = torch._foreach_norm(parts, 2.0, dtype=torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([each.to(device) for each in norms]))
    return norm


def _step(optimizer: Optimizer, parameters: Sequence[nn.Parameter], clip: Tensor) -> None:
    """Step those parameters that have gradients."""
    with torch.no_grad():
        if gradients := _gradients(parameters):
            torch._foreach_mul_(gradients, clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
