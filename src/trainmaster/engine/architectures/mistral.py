"""Mistral's dense models."""

from __future__ import annotations

from trainmaster.engine.architectures.family import Bias, Family, windowed_everywhere

MISTRAL = Family(
    unsaid={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131_072},
    qkv_bias=Bias.NEVER,
    output_bias=Bias.NEVER,
    layer_types=windowed_everywhere,
)
