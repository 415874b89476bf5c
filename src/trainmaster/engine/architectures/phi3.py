"""Phi 3 and 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainmaster.engine.architectures.family import Bias, Family, windowed_everywhere
from trainmaster.engine.config_values import Values


def _short_context(values: Values) -> Mapping[str, Any]:
    """Longrope turns sequences beyond the original context, and every token of them, by other angles.

    A sampled sequence that grows beyond it would have to be computed again from its first token; it ends there instead.
    """
    scaling = values.raw.get("rope_parameters") or values.raw.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) == "default":
        return {}
    inner = values if values.raw.get("original_max_position_embeddings") else Values(scaling, values.path)
    return {"max_positions": inner.count("original_max_position_embeddings", 4096)}


PHI3 = Family(
    unsaid={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    qkv_bias=Bias.NEVER,
    output_bias=Bias.NEVER,
    fused_qkv=True,
    fused_gate_up=True,
    layer_types=windowed_everywhere,
    rope_names={"su": "longrope", "yarn": "longrope"},
    rotary_share=1.0,
    more=_short_context,
)
