"""Attention with latent keys and values (MLA), as DeepSeek's models and Kimi K2 have it.

Attention and its cache see keys and values of every head, as of other models: adapters of `kv_b_proj` differ from
request to request, and so may what one latent vector means. A token takes `heads x (key width + value width)` numbers
for each layer (DeepSeek V3: 40,960, which is 80 KiB in 16 bits), where its latent vector has `rank + turned width`
(576). The sampler therefore runs fewer sequences at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainmaster.engine.adapters import AdaptedRows
from trainmaster.engine.attention import Attention, Scoring
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.layers import Linear, Norm, together
from trainmaster.engine.rotary import RotaryAngles, apply_rotary

_NORM_EPS = 1e-6
"""Of the norms of latent vectors, whatever `rms_norm_eps` says: models were trained so."""


class LatentAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        latent, hidden, heads = config.latent, config.hidden_size, config.num_heads
        if latent is None:
            raise ValueError(f"layer {layer} has no latent keys and values")
        self._latent, self._layer, self._rope = latent, layer, config.ropes[layer]
        self._scoring = Scoring(scale=config.attention_scale, window=None, softcap=None)
        prefix = f"model.layers.{layer}.self_attn."
        if latent.query_rank is None:
            self.q_proj = Linear(prefix + "q_proj", hidden, heads * latent.key_width)
        else:
            self.q_a_proj = Linear(prefix + "q_a_proj", hidden, latent.query_rank, bias=config.qkv_bias)
            self.q_a_layernorm = Norm(latent.query_rank, config, eps=_NORM_EPS)
            self.q_b_proj = Linear(prefix + "q_b_proj", latent.query_rank, heads * latent.key_width)
        joint = latent.rank + latent.turned_width
        self.kv_a_proj_with_mqa = Linear(prefix + "kv_a_proj_with_mqa", hidden, joint, bias=config.qkv_bias)
        self.kv_a_layernorm = Norm(latent.rank, config, eps=_NORM_EPS)
        self.kv_b_proj = Linear(prefix + "kv_b_proj", latent.rank, heads * (latent.plain_width + latent.value_width))
        self.o_proj = Linear(prefix + "o_proj", heads * latent.value_width, hidden, bias=config.output_bias)

    @property
    def same_rows(self) -> tuple[Linear, ...]:
        """The layers that see the rows."""
        return (self.q_proj if self._latent.query_rank is None else self.q_a_proj, self.kv_a_proj_with_mqa)

    @property
    def wide(self) -> tuple[tuple[Linear, ...], ...]:
        """The layers that may have weights of 8 bits, with those that see the same rows."""
        read = () if self._latent.query_rank is None else ((self.q_b_proj,),)
        return self.same_rows, *read, (self.kv_b_proj,), (self.o_proj,)

    def forward(
        self, rows: Tensor, angles: RotaryAngles | None, attention: Attention, adapters: AdaptedRows | None
    ) -> Tensor:
        latent = self._latent
        asked, joint = together(self.same_rows, rows, adapters)
        if latent.query_rank is not None:
            asked = self.q_b_proj(self.q_a_layernorm(asked.contiguous()), adapters)
        vector, turned_key = joint[:, : latent.rank], joint[:, latent.rank :]
        told: Tensor = self.kv_b_proj(self.kv_a_layernorm(vector.contiguous()), adapters)
        query, turned_query = _heads(asked, latent.plain_width, latent.turned_width)
        key, value = _heads(told, latent.plain_width, latent.value_width)
        turned_key = turned_key.unsqueeze(1)
        if angles is not None and self._rope is not None:
            interleaved = self._rope.interleaved
            turned_query = apply_rotary(turned_query, angles, interleaved=interleaved)
            turned_key = apply_rotary(turned_key, angles, interleaved=interleaved)
        query = torch.cat([query, turned_query], dim=2)
        key = torch.cat([key, turned_key.expand(-1, key.shape[1], -1)], dim=2)
        output: Tensor = self.o_proj(attention(self._layer, query, key, value, self._scoring).flatten(1), adapters)
        return output


def _heads(columns: Tensor, first: int, second: int) -> tuple[Tensor, Tensor]:
    """The two parts of every head: [n, heads, width] each."""
    heads = columns.view(len(columns), -1, first + second)
    return heads[..., :first], heads[..., first:]
