"""The transformer: one set of layers for all families that `ModelConfig` describes.

Parameters have their names of a checkpoint of a language model; only attention knows where a sequence ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainmaster.engine import kernels
from trainmaster.engine.adapters import AdaptedRows
from trainmaster.engine.architectures.family import HeadNorm
from trainmaster.engine.attention import Attention, Scoring
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.latent_attention import LatentAttention
from trainmaster.engine.layers import Linear, Norm, together
from trainmaster.engine.linear_attention import LinearMixer
from trainmaster.engine.mixture import MixtureMlp
from trainmaster.engine.products import gated, lay_together, quantized_together, sigmoid
from trainmaster.engine.quantized import ALIGNED, can_be_quantized, quantize
from trainmaster.engine.rotary import RotaryAngles, apply_rotary, rotary_angles
from trainmaster.engine.targets import UNEMBEDDING
from trainmaster.engine.types import EngineError
from trainmaster.engine.weight_files import load_weights


class Unembedding(Linear):
    """From hidden states to logits; `target_logprobs` uses its weight for a few rows at a time."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(UNEMBEDDING, config.hidden_size, config.vocab_size)
        self.logit_softcap = config.logit_softcap


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self._config, self._layer = config, layer
        self._scoring = Scoring(
            scale=config.attention_scale, window=config.windows[layer], softcap=config.attention_softcap
        )
        self._place = sum(config.attends[:layer])
        hidden, width = config.hidden_size, config.head_dim
        queries, keys = config.num_heads * width, config.num_key_value_heads * width
        asked = 2 * queries if config.gated_attention else queries
        self._widths = (queries, keys, keys)
        prefix = f"model.layers.{layer}.self_attn."
        if config.fused_qkv:
            self.qkv_proj = Linear(prefix + "qkv_proj", hidden, queries + 2 * keys, bias=config.qkv_bias)
        else:
            self.q_proj = Linear(prefix + "q_proj", hidden, asked, bias=config.qkv_bias)
            self.k_proj = Linear(prefix + "k_proj", hidden, keys, bias=config.qkv_bias)
            self.v_proj = Linear(prefix + "v_proj", hidden, keys, bias=config.qkv_bias)
        self.o_proj = Linear(prefix + "o_proj", queries, hidden, bias=config.output_bias)
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.attention_sinks else None
        if config.head_norm:
            over_all = config.head_norm is HeadNorm.ALL_HEADS
            self.q_norm = Norm(queries if over_all else width, config)
            self.k_norm = Norm(keys if over_all else width, config)

    @property
    def same_rows(self) -> tuple[Linear, ...]:
        """The layers that see the rows."""
        return (self.qkv_proj,) if self._config.fused_qkv else (self.q_proj, self.k_proj, self.v_proj)

    @property
    def wide(self) -> tuple[tuple[Linear, ...], ...]:
        """The layers that may have weights of 8 bits, with those that see the same rows."""
        return self.same_rows, (self.o_proj,)

    def forward(
        self, rows: Tensor, angles: RotaryAngles | None, attention: Attention, adapters: AdaptedRows | None
    ) -> Tensor:
        query, key, value, gate = self._projected(rows, adapters)
        query, key = self._turned(query, key, angles)
        scoring = self._scoring if self.sinks is None else replace(self._scoring, sinks=self.sinks)
        attended = attention(self._place, query, key, value, scoring).flatten(1)
        output: Tensor = self.o_proj(attended if gate is None else attended * sigmoid(gate), adapters)
        return output

    def _projected(self, rows: Tensor, adapters: AdaptedRows | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values of the rows, [n, heads, width] each, and gates [n, heads x width], if any."""
        config = self._config
        if config.fused_qkv:
            query, key, value = self.qkv_proj(rows, adapters).split(self._widths, dim=1)
        else:
            query, key, value = together(self.same_rows, rows, adapters)
        if config.head_norm is HeadNorm.ALL_HEADS:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (each.unflatten(1, (-1, config.head_dim)) for each in (query, key, value))
        if not config.gated_attention:
            return query, key, value, None
        # Of each head, the query and then the gate.
        query, gate = query.view(len(rows), config.num_heads, 2, config.head_dim).unbind(2)
        return query, key, value, gate.flatten(1)

    def _turned(self, query: Tensor, key: Tensor, angles: RotaryAngles | None) -> tuple[Tensor, Tensor]:
        """Queries and keys after the norms of single heads, if there are any, and turned by their positions."""
        config, rope = self._config, self._config.ropes[self._layer]
        has_norms = config.head_norm is HeadNorm.EACH_HEAD
        if rope is not None and angles is not None and kernels.serve(query):
            from trainmaster.engine.kernels.heads import HeadNorms, turned

            norms = None
            if has_norms:
                norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, config.norm_eps, config.norm_offset)
            return turned(query, key, *angles, norms, interleaved=rope.interleaved)
        if has_norms:
            query, key = self.q_norm(query), self.k_norm(key)
        if rope is not None and angles is not None:
            query = apply_rotary(query, angles, interleaved=rope.interleaved)
            key = apply_rotary(key, angles, interleaved=rope.interleaved)
        return query, key


class Mlp(nn.Module):
    def __init__(self, config: ModelConfig, inner: int, target: str) -> None:
        super().__init__()
        hidden, bias, prefix = config.hidden_size, config.mlp_bias, f"{target}."
        self._fused = config.fused_gate_up
        if config.fused_gate_up:
            self.gate_up_proj = Linear(prefix + "gate_up_proj", hidden, 2 * inner, bias=bias)
        else:
            self.gate_proj = Linear(prefix + "gate_proj", hidden, inner, bias=bias)
            self.up_proj = Linear(prefix + "up_proj", hidden, inner, bias=bias)
        self.down_proj = Linear(prefix + "down_proj", inner, hidden, bias=bias)
        self._activation = config.activation

    @property
    def same_rows(self) -> tuple[Linear, ...]:
        """The layers that see the rows."""
        return (self.gate_up_proj,) if self._fused else (self.gate_proj, self.up_proj)

    @property
    def wide(self) -> tuple[tuple[Linear, ...], ...]:
        """The layers that may have weights of 8 bits, with those that see the same rows."""
        return self.same_rows, (self.down_proj,)

    def forward(self, rows: Tensor, adapters: AdaptedRows | None) -> Tensor:
        if self._fused:
            gate, up = self.gate_up_proj(rows, adapters).chunk(2, dim=1)
        else:
            gate, up = together(self.same_rows, rows, adapters)
        output: Tensor = self.down_proj(gated(gate, up, self._activation), adapters)
        return output


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self._norms, self._residual_scale = config.norms, config.residual_scale
        self._attends = config.attends[layer]
        if config.latent is not None:
            self.self_attn: nn.Module = LatentAttention(config, layer)
        elif config.attends[layer]:
            self.self_attn = SelfAttention(config, layer)
        else:
            self.linear_attn = LinearMixer(config, layer)
        self.mlp = _mlp(config, f"model.layers.{layer}.mlp", layer)
        for name in astuple(config.norms):
            if name is not None:
                self.add_module(name, Norm(config.hidden_size, config))

    def forward(
        self,
        rows: Tensor,
        added: Tensor | None,
        angles: RotaryAngles | None,
        attention: Attention,
        adapters: AdaptedRows | None,
    ) -> tuple[Tensor, Tensor]:
        """From a residual, and what is yet to be added to it, to the next: the norm that follows adds, too."""
        norms = self._norms
        normed, rows = self._normed_sum(norms.before_attention, rows, added)
        if self._attends:
            attended = self.self_attn(normed, angles, attention, adapters)
        else:
            attended = self.linear_attn(normed, attention, adapters)
        normed, rows = self._normed_sum(norms.before_mlp, rows, self._ended(norms.after_attention, attended))
        return rows, self._ended(norms.after_mlp, self.mlp(normed, adapters))

    def _normed_sum(self, name: str | None, rows: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        if name is not None:
            return cast(Norm, getattr(self, name)).of_sum(rows, added)
        total = rows if added is None else rows + added
        return total, total

    def _ended(self, name: str | None, more: Tensor) -> Tensor:
        """What attention or MLP add, after the norm that they may have."""
        more = more if name is None else getattr(self, name)(more)
        return more if self._residual_scale == 1.0 else more * self._residual_scale


def _mlp(config: ModelConfig, target: str, layer: int) -> nn.Module:
    mixture = config.mixture
    if mixture is None or not mixture.layers[layer]:
        return Mlp(config, config.intermediate_size, target)
    shared = Mlp(config, mixture.shared_width, f"{target}.{mixture.shared}") if mixture.shared_width else None
    return MixtureMlp(config, mixture, target, shared)


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
        self.is_quantized = False
        """Whether some weights have 8 bits."""
        with torch.device("meta"):
            self.model = DecoderBody(config)
            self.lm_head = Unembedding(config)
        if config.tied:
            self.lm_head.weight = cast(nn.Parameter, self.model.embed_tokens.weight)
        self.requires_grad_(False)

    def load(
        self,
        directory: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        fp8: bool = False,
    ) -> Transformer:
        """`fp8`: with weights of 8 bits where there can be, and no others there."""
        load_weights(self, self.config, Path(directory), torch.device(device), dtype)
        if fp8:
            self.quantize()
        if self.device.type == "cuda":
            self.lay_weights_together()
        return self

    @property
    def wide_weights(self) -> frozenset[str]:
        """The names of the weights that `quantize` replaces."""
        found = (layer for layers in self._wide() for layer in layers if can_be_quantized(layer.weight))
        return frozenset(f"{layer.target}.weight" for layer in found)

    def quantize(self) -> None:
        """Replace frozen weights of attention and MLPs, wherever they are, by those of 8 bits on the device."""
        for layers in self._wide():
            quantize(layers, self.device)
        self.is_quantized = any(layer.quantized is not None for layers in self._wide() for layer in layers)
        if not self.is_quantized:
            raise EngineError(f"fp8 needs layers whose widths are multiples of {ALIGNED}, and this model has none")

    def _wide(self) -> Iterator[tuple[Linear, ...]]:
        for module in self.modules():
            if isinstance(module, SelfAttention | LatentAttention | Mlp | LinearMixer):
                yield from module.wide

    def lay_weights_together(self) -> None:
        """Let products of the same rows be one, as long as their weights are not trained."""
        for module in self.modules():
            if isinstance(module, SelfAttention | LatentAttention | Mlp) and len(module.same_rows) > 1:
                if quantized_together(module.same_rows) is None:
                    lay_together([layer.weight for layer in module.same_rows])
                lay_together([layer.bias for layer in module.same_rows if layer.bias is not None])

    def use(self, weights: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> Transformer:
        """Have these parameters, by the names of its own, for weights: they stay their owner's, who may train them."""
        by_own = {id(parameter): weights[name] for name, parameter in self.named_parameters()}
        for name, buffer in buffers.items():
            owner, _, own = name.rpartition(".")
            self.get_submodule(owner).register_buffer(own, buffer)
        for module in self.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, by_own[id(parameter)])
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
        adapters: AdaptedRows | None = None,
        *,
        recompute: float = 0.0,
    ) -> Tensor:
        """Hidden states [n, hidden] after the last norm, of sequences end to end; tokens and positions are int64 [n].

        `recompute` is the share of the layers, the first ones, that are computed again for the gradients: at 1, one
        more forward pass for a fraction of the memory.
        """
        if adapters is not None and adapters.total != len(tokens):
            raise ValueError(f"adapters of {adapters.total} rows cannot adapt {len(tokens)}")
        rows = self.model.embed_tokens(tokens)
        if self.config.embedding_scale != 1.0:
            # Rounded as the embedding is: models were trained so.
            rows = rows * torch.tensor(self.config.embedding_scale, dtype=rows.dtype).item()
        turns = {
            rope: None if rope is None else rotary_angles(positions, rope, self.config.head_dim, rows.dtype)
            for rope in set(self.config.ropes)
        }
        added: Tensor | None = None
        recomputed = round(recompute * self.config.num_layers) if torch.is_grad_enabled() else 0
        for index, (layer, rope) in enumerate(zip(self.model.layers, self.config.ropes, strict=True)):
            rest = turns[rope], attention, adapters
            if index < recomputed:
                # One tensor to keep for each layer instead of two.
                rows = rows if added is None else rows + added
                rows, added = checkpoint(layer, rows, None, *rest, use_reentrant=False, preserve_rng_state=False)
            else:
                rows, added = layer(rows, added, *rest)
        output, _ = self.model.norm.of_sum(rows, added)
        # Logits are linear in it.
        return output if self.config.logit_divisor == 1.0 else output / self.config.logit_divisor
