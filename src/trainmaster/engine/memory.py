"""How much memory a backward pass takes on a GPU, and how many layers are computed again so that it fits.

A layer keeps what its backward pass reads. One that is computed again keeps its input alone, and the rest is there only
while its turn comes. The first layers are those: when the backward pass reaches them, the others' memory is free again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainmaster.engine.config import ModelConfig
from trainmaster.engine.loss_head import LOGITS
from trainmaster.engine.passes import CheckedPass
from trainmaster.engine.trained_model import TrainedModel
from trainmaster.engine.types import EngineError, Trained

_SPARE = 0.04
"""Of the free memory: for what has no formula, such as the work space of libraries, and for gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """In bytes, for one model and the rank of its adapters."""

    layers: int
    kept: int
    """By a layer, for each token."""
    border: int
    """By a layer that is computed again, for each token."""
    passing: int
    """For each token, while the backward pass is in one layer, and outside of the layers."""
    squares: int
    """By each layer, for each pair of tokens of a sequence, where attention is computed by plain operations."""
    logits: int
    """For the logits of one token, with their gradients; no more than LOGITS are there at a time."""
    most_logits: int
    fixed: int
    """For any number of tokens: gradients of weights."""

    @classmethod
    def of(
        cls, config: ModelConfig, *, bytes_each: int, rank: int = 0, gradients: int = 0, fp8: bool = False
    ) -> PassMemory:
        """`gradients`: the bytes that the gradients of what is trained take."""
        hidden = config.hidden_size
        queries, keys = config.num_heads * config.key_width, config.num_key_value_heads * config.key_width
        values, attended = config.num_key_value_heads * config.value_width, config.num_heads * config.value_width
        # Inputs of norms and of products, and what attention reads: queries, keys, values and its own output.
        norms = config.norms
        named = (norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp)
        attention = 2 * hidden + queries + attended + keys + values
        if config.head_norm is not None or config.fused_qkv or fp8:
            # Before they are normed and turned, too; values that are columns of one product keep it as a whole.
            attention += queries + keys
        if (latent := config.latent) is not None:
            # Latent vectors before and after norms, what keys and values are parts of, and values as wide as keys.
            attention += 2 * ((latent.query_rank or 0) + latent.rank) + keys + queries
        kept = attention + hidden * sum(each is not None for each in named) + _kept_by_mlp(config)
        # Of q, k, v, o, gate, up and down, the rows times A.
        kept = bytes_each * (kept + 7 * rank) + 4 * config.num_heads
        plain = config.attention_softcap is not None or config.attention_sinks
        return cls(
            layers=config.num_layers,
            kept=kept,
            border=bytes_each * hidden,
            # The gradients of what the MLP keeps, and of some rows, are there with what one layer keeps.
            # With 8 bits, so are the rounded gradients of gate and up.
            passing=kept + bytes_each * (_kept_by_mlp(config) + 6 * hidden) + fp8 * 2 * config.intermediate_size,
            squares=3 * config.num_heads * (bytes_each + 4) if plain else 0,
            logits=config.vocab_size * (4 + 4 + bytes_each),
            most_logits=LOGITS * (4 + 4 + bytes_each),
            fixed=gradients,
        )

    def needed(self, lengths: Sequence[int], recomputed: int) -> int:
        """For sequences of these lengths, if so many layers are computed again."""
        tokens, pairs = sum(lengths), sum(length**2 for length in lengths)
        left = self.layers - recomputed
        of_layers = tokens * (left * self.kept + recomputed * self.border) + left * pairs * self.squares
        # One of those that are computed again is there as a whole, too.
        logits = min(tokens * self.logits, self.most_logits)
        return of_layers + tokens * self.passing + pairs * self.squares + logits + self.fixed

    def recomputed(self, lengths: Sequence[int], free: int) -> int:
        """How few layers need be computed again; all, if even that does not fit."""
        return next((n for n in range(self.layers + 1) if self.needed(lengths, n) <= free), self.layers)

    def check(self, what: str, length: int, free: int) -> None:
        """Refuse a sequence that cannot fit: an EngineError."""
        needed = self.needed([length], self.layers)
        if needed > free:
            raise EngineError(
                f"{what} has {length:,} tokens: its backward pass needs {_gib(needed)} of GPU memory even if every "
                f"layer is computed again, and {_gib(free)} are free; train on sequences of up to "
                f"{self._longest(free):,} tokens"
            )

    def _longest(self, free: int) -> int:
        short, long = 0, 1
        while self.needed([long], self.layers) <= free:
            short, long = long, 2 * long
        while long - short > 1:
            middle = (short + long) // 2
            if self.needed([middle], self.layers) <= free:
                short = middle
            else:
                long = middle
        return short


def _kept_by_mlp(config: ModelConfig) -> int:
    """Gate, up and their product; of a mixture, for each expert of a token, and copies of the token, too."""
    plain = 3 * config.intermediate_size
    mixture = config.mixture
    if mixture is None:
        return plain
    return max(plain, mixture.chosen * (3 * mixture.width + 2 * config.hidden_size))


def memory_of(models: Sequence[TrainedModel]) -> PassMemory:
    """Of models on one base that are computed together."""
    base = models[0].transformer
    gradients = sum(4 * each.numel() for model in models for each in model.parameters.values())
    if any(model.trained is Trained.ALL for model in models):
        # In the weights' own type first.
        gradients += sum(each.nbytes for model in models for each in model.parameters.values())
    rank = max((model.lora.rank for model in models if model.lora), default=0)
    return PassMemory.of(
        base.config, bytes_each=base.dtype.itemsize, rank=rank, gradients=gradients, fp8=base.is_quantized
    )


def check_memory(checked: CheckedPass, free: int) -> None:
    """Refuse sequences that a backward pass cannot take, however it is computed: an EngineError."""
    memory = memory_of([checked.model])
    longest = max(range(len(checked.lengths)), key=checked.lengths.__getitem__)
    memory.check(f"datum {longest}", checked.lengths[longest], free)


def free_bytes(device: torch.device) -> int:
    """What a pass can have: a GPU's free memory, with what PyTorch reserved and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int((torch.cuda.mem_get_info(device)[0] + unused) * (1 - _SPARE))


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
