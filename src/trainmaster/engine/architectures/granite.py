"""Granite's dense models, whose sums and products have multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainmaster.engine.architectures.family import Bias, Family
from trainmaster.engine.config_values import Values


def _multipliers(values: Values) -> Mapping[str, Any]:
    return {
        "embedding_scale": values.number("embedding_multiplier", 1.0),
        "attention_scale": values.number("attention_multiplier", 1.0),
        "residual_scale": values.number("residual_multiplier", 1.0),
        "logit_divisor": values.number("logits_scaling", 1.0),
    }


GRANITE = Family(unsaid={"max_position_embeddings": 2048}, mlp_bias=Bias.IF_SAID, more=_multipliers)
