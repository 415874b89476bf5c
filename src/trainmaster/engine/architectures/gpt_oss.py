"""GPT-OSS: attention with sinks, and a mixture of experts in every layer, which is published as MXFP4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster.engine.architectures.family import FULL, SLIDING, Family
from trainmaster.engine.architectures.mixtures import Clamp, Mixture, Stored
from trainmaster.engine.config_values import Values


def _layer_types(values: Values) -> Sequence[str]:
    return [FULL if layer % 2 else SLIDING for layer in range(values.count("num_hidden_layers"))]


def _mixture(values: Values) -> Mapping[str, Any]:
    mixture = Mixture(
        layers=(True,) * values.count("num_hidden_layers"),
        experts=values.count_of("num_local_experts", "num_experts", default=128),
        chosen=values.count_of("num_experts_per_tok", "experts_per_token", default=4),
        width=values.count("intermediate_size"),
        router="router",
        router_bias=True,
        bias=True,
        interleaved=True,
        clamp=Clamp(values.number("swiglu_alpha", 1.702), values.number("swiglu_limit", 7.0)),
        stored=Stored.TOGETHER,
    )
    return {"mixture": mixture, "attention_sinks": True}


GPT_OSS = Family(
    unsaid={
        "attention_bias": True,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131_072,
    },
    head_dim=64,
    layer_types=_layer_types,
    rope_theta=150_000.0,
    rope_unsaid={
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    quantized=("mxfp4",),
    more=_mixture,
)
