"""What passes are checked for, and how they are cut into packs of sequences, of one model or of many.

Chunks are cut by a request's own sequences, one of a model in a pack: so gradients do not depend on the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from trainmaster.engine import losses
from trainmaster.engine.losses import LossFunction, Options
from trainmaster.engine.trained_model import TrainedModel, add_up
from trainmaster.engine.types import EngineError, Pass, Trained, check_tokens, check_vocabulary


def cut(lengths: Sequence[int], widths: Sequence[Hashable], budget: int) -> list[range]:
    """Split sequences into chunks of one width (targets per position), of at most `budget` tokens or one sequence."""
    chunks: list[range] = []
    start, room = 0, budget
    for index, length in enumerate(lengths):
        if index > start and (length > room or widths[index] != widths[start]):
            chunks.append(range(start, index))
            start, room = index, budget
        room -= length
    return [*chunks, range(start, len(lengths))]


def pack(chunks: Sequence[Chunk], budget: int) -> Iterator[list[Chunk]]:
    """Group chunks to compute together, up to `budget` rows unless one has more; those of an owner stay in order."""
    waiting: dict[Hashable, deque[Chunk]] = {}
    for chunk in chunks:
        waiting.setdefault(chunk.owner, deque()).append(chunk)
    while waiting:
        first = next(iter(waiting.values()))[0]
        packed, room = [], budget
        for owner, queue in list(waiting.items()):
            chunk = queue[0]
            if chunk is not first and (chunk.kind != first.kind or chunk.rows > room):
                continue
            packed.append(queue.popleft())
            room -= chunk.rows
            if not queue:
                del waiting[owner]
        yield packed


def share(lengths: Sequence[int], ranks: int) -> list[range]:
    """Split sequences into consecutive parts for the ranks, of about as many tokens each; a part may be empty."""
    total, done, index = sum(lengths), 0, 0
    shares = []
    for rank in range(ranks):
        start = index
        # A sequence goes to the rank whose part contains its middle.
        while index < len(lengths) and (done + lengths[index] / 2) * ranks < total * (rank + 1):
            done += lengths[index]
            index += 1
        shares.append(range(start, index))
    return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPass:
    request: Pass
    model: TrainedModel
    loss: LossFunction
    options: Options
    inputs: Sequence[Mapping[str, np.ndarray]]

    @property
    def lengths(self) -> list[int]:
        return [len(datum.tokens) for datum in self.request.data]

    @property
    def widths(self) -> list[tuple[int, ...]]:
        """The number of targets per position of each datum; empty: one, without an axis."""
        return [each[losses.TARGETS].shape[1:] for each in self.inputs]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    number: int
    of: CheckedPass
    data: range

    @property
    def lengths(self) -> list[int]:
        return [len(self.of.request.data[index].tokens) for index in self.data]

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    @property
    def names(self) -> list[str]:
        return [name for name in self.of.inputs[self.data.start] if name != losses.TARGETS]

    @property
    def owner(self) -> Hashable:
        """The model whose gradients it adds to: one chunk of it at a time, in order."""
        return self.of.model.model_id

    @property
    def kind(self) -> Hashable:
        """Chunks of one kind can be computed together."""
        shape = self.of.inputs[self.data.start][losses.TARGETS].shape
        return id(self.of.model.transformer), shape[1:], self.of.request.backward

    def joined(self, name: str) -> np.ndarray:
        return np.concatenate([self.of.inputs[index][name] for index in self.data])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkResult:
    outputs: list[dict[str, np.ndarray]]
    metrics: dict[str, float]
    gradients: dict[str, Tensor]
    """Of the model's parameters; empty without a backward pass."""


@dataclass(slots=True)
class Computed:
    outputs: list[dict[str, np.ndarray]] = field(default_factory=list)
    metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Of each chunk, with its number of data."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    failure: EngineError | None = None

    def add(self, part: ChunkResult | EngineError) -> None:
        if isinstance(part, EngineError):
            self.failure = self.failure or part
            return
        self.outputs += part.outputs
        self.metrics.append((len(part.outputs), part.metrics))
        self.gradients = add_up(self.gradients, part.gradients)


def check_pass(request: Pass, model: TrainedModel, *, vocabulary: int, context: int) -> CheckedPass:
    loss, options = losses.find(request.loss), losses.options_of(request.loss, request.options)
    if request.backward and model.trained is Trained.NOTHING:
        raise EngineError(
            f"model {model.model_id!r} is frozen: it computes forward passes, and there is nothing to train in it"
        )
    if not request.data:
        raise EngineError("the request has no data")
    inputs = []
    for index, datum in enumerate(request.data):
        check_tokens(f"datum {index}", datum.tokens, vocabulary=vocabulary, context=context)
        inputs.append(losses.inputs_of(request.loss, options, index, datum))
        check_vocabulary(f"{losses.TARGETS} of datum {index}", inputs[-1][losses.TARGETS], vocabulary)
    return CheckedPass(request=request, model=model, loss=loss, options=options, inputs=inputs)
