"""OLMo 2."""

from __future__ import annotations

from trainmaster.engine.architectures.family import Family, HeadNorm, LayerNorms

OLMO2 = Family(
    unsaid={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    norms=LayerNorms(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    ),
    head_norm=HeadNorm.ALL_HEADS,
)
