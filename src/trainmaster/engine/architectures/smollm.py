"""SmolLM 3."""

from __future__ import annotations

from collections.abc import Sequence

from trainmaster.engine.architectures.family import FULL, SLIDING, Bias, Family
from trainmaster.engine.config_values import Values


def _turned(values: Values) -> list[bool]:
    """For each layer, whether positions turn its queries and keys."""
    layers = values.count("num_hidden_layers")
    listed = values.raw.get("no_rope_layers")
    if listed is not None:
        return [bool(each) for each in values.numbers("no_rope_layers", layers)]
    every = values.count("no_rope_layer_interval", 4)
    return [bool((layer + 1) % every) for layer in range(layers)]


def _layer_types(values: Values) -> Sequence[str]:
    windowed = values.flag("use_sliding_window") and values.raw.get("sliding_window") is not None
    return [SLIDING if windowed and not turned else FULL for turned in _turned(values)]


SMOLLM3 = Family(
    unsaid={"tie_word_embeddings": True, "num_key_value_heads": 4, "max_position_embeddings": 32768},
    mlp_bias=Bias.IF_SAID,
    layer_types=_layer_types,
    rope_theta=2e6,
    turned=_turned,
)
