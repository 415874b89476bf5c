"""Sums of gradients over data-parallel ranks, begun while the backward pass still computes the gradients before them.

Gradients are summed in buckets: each small one would wait for the other ranks. A bucket holds parameters that follow
each other, the last ones first, as a backward pass reaches them. Its sum begins when its last gradient is there. All
ranks begin the sums in the order of the buckets, whatever the order in which gradients arrive.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 64 << 20
"""About the size of a bucket."""
_UNDER_WAY = 2
"""How many sums are under way at most: each holds a copy of its gradients."""

GradientOf = Callable[[nn.Parameter], Tensor | None]


@dataclass(frozen=True, slots=True, eq=False)
class _Sum:
    gradients: list[Tensor]
    flat: Tensor
    work: dist.Work

    @classmethod
    def begin(cls, gradients: list[Tensor]) -> _Sum:
        only = gradients[0] if len(gradients) == 1 and gradients[0].is_contiguous() else None
        flat = torch.cat([each.reshape(-1) for each in gradients]) if only is None else only
        return cls(gradients, flat, dist.all_reduce(flat, async_op=True))

    def finish(self) -> None:
        """Have the gradients be the sums. On a GPU, only the stream waits."""
        self.work.wait()
        if self.flat is self.gradients[0]:
            return
        parts = torch.split_with_sizes(self.flat, [each.numel() for each in self.gradients])
        summed = [part.view_as(each) for part, each in zip(parts, self.gradients, strict=True)]
        torch._foreach_copy_(self.gradients, summed)


class GradientSums:
    def __init__(self, parameters: Sequence[nn.Parameter], gradient_of: GradientOf) -> None:
        """`parameters`: those that autograd computes gradients for; `gradient_of`: what is to be summed of each."""
        self._buckets = list(_buckets(parameters[::-1]))
        self._gradient_of = gradient_of
        self._missing = [0] * len(self._buckets)
        self._next = len(self._buckets)
        self._under_way: deque[_Sum] = deque()
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                arrived = functools.partial(self._arrived, number)
                parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """From now on, gradients that arrive are the last ones of their step."""
        self._missing = [len(bucket) for bucket in self._buckets]
        self._next = 0

    def finish(self) -> None:
        """Sum the gradients that did not arrive by autograd, too, and wait for all sums."""
        while self._next < len(self._buckets):
            self._start()
        while self._under_way:
            self._under_way.popleft().finish()

    def _arrived(self, number: int, _parameter: Tensor) -> None:
        self._missing[number] -= 1
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._start()

    @torch.no_grad()
    def _start(self) -> None:
        """Begin the next bucket's sum. Gradients that no rank has are not there."""
        bucket = self._buckets[self._next]
        self._next += 1
        gradients = [gradient for each in bucket if (gradient := self._gradient_of(each)) is not None]
        if not gradients:
            return
        while len(self._under_way) >= _UNDER_WAY:
            self._under_way.popleft().finish()
        self._under_way.append(_Sum.begin(gradients))


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        full = sum(each.nbytes for each in bucket) + parameter.nbytes > BUCKET_BYTES
        if bucket and (full or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
