"""The trained weights: originals, which checkpoints and the optimizer know, and copies of fewer bits to compute with.

A step's gradients are those of the copies, summed in the originals' type over batches and ranks. Where a step is one
batch of one rank there is nothing to sum: the gradients stay as they are, and are widened a few at a time for the
optimizer, which saves as much memory as the originals have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainmaster.training.loop.peers import Peers

BUCKET_BYTES = 1 << 28
"""How many gradients are widened at a time."""
_CLIP_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""


class TrainedWeights:
    def __init__(self, *, single: bool) -> None:
        """`single`: a step is one batch of one rank."""
        self._single = single
        self._originals: list[nn.Parameter] = []
        self._copies: list[nn.Parameter] = []
        self.others: list[nn.Parameter] = []
        """Trained parameters that are computed with as they are."""

    def copy_of(self, original: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        copy = nn.Parameter(original.detach().to(dtype))
        self._originals.append(original)
        self._copies.append(copy)
        return copy

    @property
    def gradient_bytes(self) -> int:
        """What the gradients of one batch take."""
        return sum(each.nbytes for each in (*self._copies, *self.others))

    def backward(self, loss: Tensor) -> None:
        """Add a loss's gradients to those of the step."""
        loss.backward()  # type: ignore[no-untyped-call]
        if not self._single:
            self._widen(range(len(self._copies)))

    def step(self, optimizer: Optimizer, peers: Peers, *, max_norm: float) -> Tensor:
        """Step the originals by the gradients of all ranks, clipped; returns the norm of these before."""
        peers.sum_all([each.grad for each in (*self._originals, *self.others) if each.grad is not None])
        gradients = [each.grad for each in (*self._copies, *self._originals, *self.others) if each.grad is not None]
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
        norm: Tensor = torch.linalg.vector_norm(torch.stack([each.to(peers.device) for each in norms]))
        clip = (max_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0)
        _step(optimizer, [*self._originals, *self.others], clip)
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


def _step(optimizer: Optimizer, parameters: Sequence[nn.Parameter], clip: Tensor) -> None:
    """Step those parameters that have gradients."""
    if gradients := [each.grad for each in parameters if each.grad is not None]:
        torch._foreach_mul_(gradients, clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
