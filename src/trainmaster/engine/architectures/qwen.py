"""Qwen 2 and 3, and the language models of Qwen 3 VL."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from trainmaster.engine.architectures.family import Bias, Family, HeadNorm, Nested
from trainmaster.engine.architectures.mixtures import Mixture, Stored
from trainmaster.engine.architectures.naming import Naming
from trainmaster.engine.config_values import Values


def _mixture(values: Values, stored: Stored = Stored.EACH) -> Mapping[str, Any]:
    plain, every = values.raw.get("mlp_only_layers") or [], values.count("decoder_sparse_step", 1)
    layers = range(values.count("num_hidden_layers"))
    mixture = Mixture(
        layers=tuple(layer not in plain and not (layer + 1) % every for layer in layers),
        experts=values.count_of("num_experts", "num_local_experts", default=128),
        chosen=values.count("num_experts_per_tok", 8),
        width=values.count("moe_intermediate_size", 768),
        normalized=stored is Stored.TRANSPOSED or values.flag("norm_topk_prob"),
        stored=stored,
    )
    return {"mixture": mixture}


QWEN2 = Family(qkv_bias=Bias.ALWAYS, output_bias=Bias.NEVER)
QWEN3 = Family(head_dim=128, head_norm=HeadNorm.EACH_HEAD)
QWEN3_MOE = Family(unsaid={"num_key_value_heads": 4}, head_norm=HeadNorm.EACH_HEAD, more=_mixture)
# A picture's positions have three parts; a text's have one, and turn heads as in Qwen 3.
_VL_SIZES = {"tie_word_embeddings": True, "max_position_embeddings": 128_000}
QWEN3_VL_TEXT = Family(
    unsaid={**_VL_SIZES, "num_key_value_heads": 32},
    head_dim=128,
    head_norm=HeadNorm.EACH_HEAD,
    rope_theta=5e5,
)
QWEN3_VL_MOE_TEXT = Family(
    unsaid={**_VL_SIZES, "num_key_value_heads": 16, "num_local_experts": 60, "num_experts_per_tok": 4},
    head_norm=HeadNorm.EACH_HEAD,
    rope_theta=5e5,
    more=partial(_mixture, stored=Stored.TRANSPOSED),
)
_VISION = Naming(body="model.language_model.", beside=("model.visual.",))
QWEN3_VL = Nested(language_model="qwen3_vl_text", namings=(_VISION,))
QWEN3_VL_MOE = Nested(language_model="qwen3_vl_moe_text", namings=(_VISION,))
