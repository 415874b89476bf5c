"""The transformer: one set of layers for all families that `ModelConfig` describes.

Parameters have their names of a checkpoint of a language model; only attention knows where a sequence ends.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainmaster.engine.adapters import UNEMBEDDING, AdapterRows
from trainmaster.engine.attention import Attention, Scoring
from trainmaster.engine.config import ModelConfig, Rope
from trainmaster.engine.products import gated, product
from trainmaster.engine.weight_files import load_weights

# Rotary positions: the angles depend on the kind of rope that a checkpoint names.

RotaryAngles = tuple[Tensor, Tensor]
"""Cosines and sines of the angles by which positions rotate the halves of a head: [n, 1, width / 2] each."""


def rotary_angles(positions: Tensor, rope: Rope, width: int, dtype: torch.dtype) -> RotaryAngles:
    """The angles of positions, computed at least in float32 and then rounded."""
    wide = torch.promote_types(dtype, torch.float32)
    angles = positions.to(wide)[:, None, None] * _frequencies(rope, width, positions.device).to(wide)
    return (angles.cos() * rope.magnitude).to(dtype), (angles.sin() * rope.magnitude).to(dtype)


def apply_rotary(heads: Tensor, angles: RotaryAngles) -> Tensor:
    """Rotate heads [n, heads, width] by the angles of their rows."""
    cosines, sines = angles
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def _frequencies(rope: Rope, width: int, device: torch.device) -> Tensor:
    """The angle per position of each pair of a head, float32 [width / 2]."""
    places = torch.arange(0, width, 2, device=device).to(torch.float32)
    frequencies = 1.0 / rope.theta ** (places / width)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_positions * frequencies / (2 * math.pi)
        share = ((turns - rope.slow_turns) / (rope.fast_turns - rope.slow_turns)).clamp(0.0, 1.0)
        return _blended(frequencies, share, rope)
    if rope.kind == "yarn":
        return _blended(frequencies, _yarn_share(places / 2, rope, width), rope)
    return frequencies


def _blended(frequencies: Tensor, kept: Tensor, rope: Rope) -> Tensor:
    """Slow rotations are divided by the factor, fast ones stay, and those between are interpolated."""
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn_share(pairs: Tensor, rope: Rope, width: int) -> Tensor:
    """Linear in the index of the pair; Llama 3's is linear in the number of turns."""

    def pair_that_turns(times: float) -> float:
        """The pair with this many turns within the original context."""
        return width * math.log(rope.original_positions / (2 * math.pi * times)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(rope.fast_turns), pair_that_turns(rope.slow_turns)
    if rope.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    # Bounds, and what is added where they meet, are as models were trained with.
    first, last = max(first, 0), min(last, width - 1)
    return 1 - ((pairs - first) / ((last - first) or 0.001)).clamp(0.0, 1.0)


class Linear(nn.Module):
    """A layer that adapters may adapt; `target` is its name for them."""

    def __init__(self, target: str, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.target = target
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, rows: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        if adapters is None:
            return product(rows, self.weight, self.bias)
        return adapters.product(self.target, rows, self.weight, self.bias)


class Unembedding(Linear):
    """From hidden states to logits; `target_logprobs` uses its weight for a few rows at a time."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(UNEMBEDDING, config.hidden_size, config.vocab_size)
        self.logit_softcap = config.logit_softcap


class Norm(nn.Module):
    def __init__(self, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self._eps, self._offset = config.norm_eps, config.norm_offset

    def forward(self, rows: Tensor) -> Tensor:
        if not self._offset:
            return functional.rms_norm(rows, self.weight.shape, self.weight, self._eps)
        # 1 plus a small weight keeps its digits in 32 bits only.
        wide = torch.promote_types(rows.dtype, torch.float32)
        weight = self._offset + self.weight.to(wide)
        return functional.rms_norm(rows.to(wide), self.weight.shape, weight, self._eps).to(rows.dtype)


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self._config, self._layer = config, layer
        self._scoring = Scoring(
            scale=config.attention_scale, window=config.windows[layer], softcap=config.attention_softcap
        )
        hidden, width = config.hidden_size, config.head_dim
        queries, keys = config.num_heads * width, config.num_key_value_heads * width
        prefix = f"model.layers.{layer}.self_attn."
        self.q_proj = Linear(prefix + "q_proj", hidden, queries, bias=config.qkv_bias)
        self.k_proj = Linear(prefix + "k_proj", hidden, keys, bias=config.qkv_bias)
        self.v_proj = Linear(prefix + "v_proj", hidden, keys, bias=config.qkv_bias)
        self.o_proj = Linear(prefix + "o_proj", queries, hidden, bias=config.output_bias)
        if config.query_key_norm:
            self.q_norm = Norm(width, config)
            self.k_norm = Norm(width, config)

    def forward(self, rows: Tensor, angles: RotaryAngles, attention: Attention, adapters: AdapterRows | None) -> Tensor:
        config = self._config
        query = self.q_proj(rows, adapters).unflatten(1, (config.num_heads, config.head_dim))
        key = self.k_proj(rows, adapters).unflatten(1, (config.num_key_value_heads, config.head_dim))
        value = self.v_proj(rows, adapters).unflatten(1, (config.num_key_value_heads, config.head_dim))
        if config.query_key_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        attended = attention(self._layer, apply_rotary(query, angles), apply_rotary(key, angles), value, self._scoring)
        output: Tensor = self.o_proj(attended.flatten(1), adapters)
        return output


class Mlp(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        prefix = f"model.layers.{layer}.mlp."
        self.gate_proj = Linear(prefix + "gate_proj", hidden, inner, bias=bias)
        self.up_proj = Linear(prefix + "up_proj", hidden, inner, bias=bias)
        self.down_proj = Linear(prefix + "down_proj", inner, hidden, bias=bias)
        self._activation = config.activation

    def forward(self, rows: Tensor, adapters: AdapterRows | None) -> Tensor:
        between = gated(self.gate_proj(rows, adapters), self.up_proj(rows, adapters), self._activation)
        output: Tensor = self.down_proj(between, adapters)
        return output


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self._sandwich = config.sandwich_norms
        self.input_layernorm = Norm(hidden, config)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = Norm(hidden, config)
        self.mlp = Mlp(config, layer)
        if config.sandwich_norms:
            self.pre_feedforward_layernorm = Norm(hidden, config)
            self.post_feedforward_layernorm = Norm(hidden, config)

    def forward(self, rows: Tensor, angles: RotaryAngles, attention: Attention, adapters: AdapterRows | None) -> Tensor:
        attended = self.self_attn(self.input_layernorm(rows), angles, attention, adapters)
        if not self._sandwich:
            rows = rows + attended
            return rows + self.mlp(self.post_attention_layernorm(rows), adapters)  # type: ignore[no-any-return]
        rows = rows + self.post_attention_layernorm(attended)
        through = self.mlp(self.pre_feedforward_layernorm(rows), adapters)
        return rows + self.post_feedforward_layernorm(through)  # type: ignore[no-any-return]


class DecoderBody(nn.Module):
    """All but the unembedding, as a module of its own because checkpoints name it `model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # With a weight: making a random one on the device `meta` imports torch's compiler, which takes two seconds.
        weight = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=weight)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config)


class Transformer(nn.Module):
    """A model without weights until they are loaded; loaded weights are frozen."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.model = DecoderBody(config)
            self.lm_head = Unembedding(config)
        if config.tied:
            self.lm_head.weight = cast(nn.Parameter, self.model.embed_tokens.weight)
        self.requires_grad_(False)

    def load(
        self, directory: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Transformer:
        load_weights(self, self.config, Path(directory), torch.device(device), dtype)
        return self

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def unembedding(self) -> Unembedding:
        return self.lm_head

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        adapters: AdapterRows | None = None,
        *,
        recompute: bool = False,
    ) -> Tensor:
        """Hidden states [n, hidden] after the last norm, of sequences end to end; tokens and positions are int64 [n].

        `recompute` computes each layer again for the gradients: one more forward pass, for a fraction of the memory.
        """
        if adapters is not None and adapters.total != len(tokens):
            raise ValueError(f"adapters of {adapters.total} rows cannot adapt {len(tokens)}")
        rows = self.model.embed_tokens(tokens)
        if self.config.embedding_scale != 1.0:
            # Rounded as the embedding is: models were trained so.
            rows = rows * torch.tensor(self.config.embedding_scale, dtype=rows.dtype).item()
        turns = {
            rope: rotary_angles(positions, rope, self.config.head_dim, rows.dtype) for rope in set(self.config.ropes)
        }
        for layer, rope in zip(self.model.layers, self.config.ropes, strict=True):
            if recompute and torch.is_grad_enabled():
                rows = checkpoint(
                    layer, rows, turns[rope], attention, adapters, use_reentrant=False, preserve_rng_state=False
                )
            else:
                rows = layer(rows, turns[rope], attention, adapters)
        output: Tensor = self.model.norm(rows)
        return output
