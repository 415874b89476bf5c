"""GLM 4's dense models, GLM 4.5 to 4.7, which are mixtures of experts, and GLM 5, a DeepSeek V3.2."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from trainmaster.engine.architectures.deepseek import LATENT, balanced_mixture, indexed, layers_beside
from trainmaster.engine.architectures.family import FULL, INDEXED, Bias, Family, HeadNorm, LayerNorms, windowless
from trainmaster.engine.config_values import Values


def _with_experts(values: Values) -> Mapping[str, Any]:
    mixture = balanced_mixture(values, groups=(1, 1), experts=128, width=1408, first=1, scale=1.0)
    head_norm = HeadNorm.EACH_HEAD if values.flag("use_qk_norm") else None
    return {"mixture": mixture, "head_norm": head_norm, "beside": layers_beside(values)}


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
GLM4_MOE = Family(
    unsaid={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072},
    output_bias=Bias.NEVER,
    layer_types=windowless,
    rotary_share=0.5,
    more=_with_experts,
)
GLM_MOE_DSA = Family(
    **LATENT,
    unsaid={
        "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    kinds=(FULL, INDEXED),
    quantized=("fp8",),
    more=partial(indexed, groups=(1, 1)),
)
