"""Qwen 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainmaster.engine.architectures.family import Bias, Family, HeadNorm
from trainmaster.engine.architectures.mixtures import Mixture
from trainmaster.engine.config_values import Values


def _mixture(values: Values) -> Mapping[str, Any]:
    plain, every = values.raw.get("mlp_only_layers") or [], values.count("decoder_sparse_step", 1)
    layers = range(values.count("num_hidden_layers"))
    mixture = Mixture(
        layers=tuple(layer not in plain and not (layer + 1) % every for layer in layers),
        experts=values.count_of("num_experts", "num_local_experts", default=128),
        chosen=values.count("num_experts_per_tok", 8),
        width=values.count("moe_intermediate_size", 768),
        normalized=values.flag("norm_topk_prob"),
    )
    return {"mixture": mixture}


QWEN2 = Family(qkv_bias=Bias.ALWAYS, output_bias=Bias.NEVER)
QWEN3 = Family(head_dim=128, head_norm=HeadNorm.EACH_HEAD)
QWEN3_MOE = Family(unsaid={"num_key_value_heads": 4}, head_norm=HeadNorm.EACH_HEAD, more=_mixture)
