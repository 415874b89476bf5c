"""Mistral's dense models, and Mixtral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainmaster.engine.architectures.family import Bias, Family, windowed_everywhere
from trainmaster.engine.architectures.mixtures import Mixture
from trainmaster.engine.config_values import Values


def _mixture(values: Values) -> Mapping[str, Any]:
    mixture = Mixture(
        layers=(True,) * values.count("num_hidden_layers"),
        experts=values.count("num_local_experts", 8),
        chosen=values.count("num_experts_per_tok", 2),
        width=values.count("intermediate_size"),
        module="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )
    return {"mixture": mixture}


MISTRAL = Family(
    unsaid={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
    qkv_bias=Bias.NEVER,
    output_bias=Bias.NEVER,
    layer_types=windowed_everywhere,
)
MIXTRAL = Family(
    unsaid={"num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5},
    qkv_bias=Bias.NEVER,
    output_bias=Bias.NEVER,
    layer_types=windowed_everywhere,
    more=_mixture,
)
