"""Qwen 3 Next and 3.5: three of four layers have a recurrent state, and the others gated attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from trainmaster.engine.architectures.family import FULL, LINEAR, Family, HeadNorm, Nested
from trainmaster.engine.architectures.linear import LinearAttention
from trainmaster.engine.architectures.mixtures import Mixture, Stored
from trainmaster.engine.architectures.naming import Naming
from trainmaster.engine.config_values import Values


def _layer_types(values: Values) -> Sequence[str]:
    every = values.count("full_attention_interval", 4)
    return [LINEAR if (layer + 1) % every else FULL for layer in range(values.count("num_hidden_layers"))]


def _linear(values: Values, *, by_key_head: bool = False) -> Mapping[str, Any]:
    types = values.raw.get("layer_types") or _layer_types(values)
    linear = LinearAttention(
        layers=tuple(each == LINEAR for each in types),
        key_heads=values.count("linear_num_key_heads", 16),
        value_heads=values.count("linear_num_value_heads", 32),
        key_width=values.count("linear_key_head_dim", 128),
        value_width=values.count("linear_value_head_dim", 128),
        taps=values.count("linear_conv_kernel_dim", 4),
        by_key_head=by_key_head,
    )
    if linear.value_heads % linear.key_heads:
        raise values.refuse(f"{linear.value_heads} value heads cannot share {linear.key_heads} key heads evenly")
    return {"linear": linear, "gated_attention": True}


def _with_experts(values: Values, *, by_key_head: bool = False) -> Mapping[str, Any]:
    plain, every = values.raw.get("mlp_only_layers") or [], values.count("decoder_sparse_step", 1)
    mixture = Mixture(
        layers=tuple(
            layer not in plain and not (layer + 1) % every for layer in range(values.count("num_hidden_layers"))
        ),
        experts=values.count_of("num_experts", "num_local_experts", default=512 if by_key_head else 256),
        chosen=values.count("num_experts_per_tok", 10 if by_key_head else 8),
        width=values.count("moe_intermediate_size", 512),
        normalized=not by_key_head or values.flag("norm_topk_prob", default=True),
        shared_width=values.count("shared_expert_intermediate_size", 512),
        shared_gate=True,
        stored=Stored.EACH if by_key_head else Stored.TOGETHER,
    )
    return {**_linear(values, by_key_head=by_key_head), "mixture": mixture}


_ALIKE: Mapping[str, Any] = {
    "head_dim": 256,
    "norm_offset": 1.0,
    "head_norm": HeadNorm.EACH_HEAD,
    "layer_types": _layer_types,
    "kinds": (FULL, LINEAR),
    "rotary_share": 0.25,
    "beside": ("mtp.",),
}
QWEN3_NEXT = Family(
    **_ALIKE,
    unsaid={"num_key_value_heads": 2, "max_position_embeddings": 32768},
    more=partial(_with_experts, by_key_head=True),
)
QWEN3_5_TEXT = Family(**_ALIKE, unsaid={"num_key_value_heads": 4, "max_position_embeddings": 32768}, more=_linear)
QWEN3_5_MOE_TEXT = Family(
    **_ALIKE,
    unsaid={"num_key_value_heads": 2, "max_position_embeddings": 32768, "intermediate_size": 512},
    more=_with_experts,
)
_VISION = Naming(body="model.language_model.", beside=("model.visual.",))
QWEN3_5 = Nested(language_model="qwen3_5_text", namings=(_VISION,))
QWEN3_5_MOE = Nested(language_model="qwen3_5_moe_text", namings=(_VISION,))
