"""From a batch to its loss, as a module: FSDP gathers the weights of modules when they are called."""

from __future__ import annotations

from torch import Tensor, nn

from trainmaster.engine.adapters import AdapterRows
from trainmaster.engine.attention import PackedAttention
from trainmaster.engine.model import Transformer, Unembedding
from trainmaster.training.loop.batches import Batch
from trainmaster.training.loop.objectives import Losses, Objective, answer_logprobs


class LossModule(nn.Module):
    def __init__(self, transformer: Transformer, objective: Objective) -> None:
        super().__init__()
        self.body = transformer.model
        self.head = Head(transformer.unembedding, objective)
        self.tied = transformer.config.tied
        self._hidden = transformer.hidden

    def forward(self, batch: Batch, adapters: AdapterRows | None, divisor: Tensor | None, recompute: float) -> Losses:
        """The losses, divided; without a divisor, the logprobs of answers. `recompute`: the share of the layers whose
        activations are recomputed."""
        attention = PackedAttention(batch.lengths, batch.ends)
        hidden = self._hidden(batch.tokens, batch.positions, attention, adapters, recompute=recompute)
        losses: Losses = self.head(hidden, batch, divisor)
        return losses


class Head(nn.Module):
    def __init__(self, unembedding: Unembedding, objective: Objective) -> None:
        super().__init__()
        self.unembedding = unembedding
        self._objective = objective

    def forward(self, hidden: Tensor, batch: Batch, divisor: Tensor | None) -> Losses:
        if divisor is None:
            return (answer_logprobs(hidden, batch, self.unembedding),)
        return self._objective.losses(hidden, batch, self.unembedding, divisor)
