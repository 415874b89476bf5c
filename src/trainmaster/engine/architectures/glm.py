"""GLM 4's dense models."""

from __future__ import annotations

from trainmaster.engine.architectures.family import Bias, Family, LayerNorms

GLM4 = Family(
    unsaid={
        "attention_bias": True,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 131_072,
    },
    head_dim=128,
    norms=LayerNorms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm"),
    output_bias=Bias.NEVER,
    fused_gate_up=True,
    rope_interleaved=True,
    rotary_share=0.5,
)
