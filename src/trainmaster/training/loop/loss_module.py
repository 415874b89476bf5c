"""From a batch to its loss, as a module: FSDP gathers the weights of modules when they are called."""

from __future__ import annotations

from torch import Tensor, nn

from trainmaster.engine.adapters import AdapterRows
from trainmaster.engine.attention import PackedAttention
from trainmaster.engine.cross_entropy import CrossEntropy, cross_entropy
from trainmaster.engine.model import Transformer, Unembedding
from trainmaster.training.loop.batches import Batch

Losses = tuple[Tensor, Tensor, Tensor]
"""The fields of CrossEntropy: FSDP looks for tensors in tuples."""


class LossModule(nn.Module):
    def __init__(self, transformer: Transformer) -> None:
        super().__init__()
        self.body = transformer.model
        self.head = Head(transformer.unembedding)
        self.tied = transformer.config.tied
        self._hidden = transformer.hidden

    def forward(self, batch: Batch, adapters: AdapterRows | None, divisor: Tensor, recompute: float) -> Losses:
        attention = PackedAttention(batch.lengths, batch.ends)
        hidden = self._hidden(batch.tokens, batch.positions, attention, adapters, recompute=recompute)
        losses: Losses = self.head(hidden.index_select(0, batch.trained), batch.targets, divisor)
        return losses

    def of(self, batch: Batch, adapters: AdapterRows | None, divisor: Tensor, *, recompute: float) -> CrossEntropy:
        """`recompute`: the share of the layers whose activations are recomputed."""
        loss, entropy, correct = self(batch, adapters, divisor, recompute)
        return CrossEntropy(loss=loss, entropy=entropy, correct=correct)


class Head(nn.Module):
    def __init__(self, unembedding: Unembedding) -> None:
        super().__init__()
        self.unembedding = unembedding

    def forward(self, hidden: Tensor, targets: Tensor, divisor: Tensor) -> Losses:
        losses = cross_entropy(hidden, targets, self.unembedding, divisor)
        return losses.loss, losses.entropy, losses.correct
