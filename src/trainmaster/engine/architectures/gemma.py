"""Gemma 1 to 3."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainmaster.engine.architectures.family import FULL, SLIDING, Family, HeadNorm, LayerNorms, Nested
from trainmaster.engine.architectures.naming import Naming
from trainmaster.engine.config_values import Values


def _full_every(pattern: int) -> Callable[[Values], Sequence[str]]:
    """Every n-th layer sees everything, and the others a window."""

    def layer_types(values: Values) -> Sequence[str]:
        every = values.count("sliding_window_pattern", pattern)
        return [SLIDING if (layer + 1) % every else FULL for layer in range(values.count("num_hidden_layers"))]

    return layer_types


def _scaled_embedding(values: Values) -> Mapping[str, Any]:
    return {"embedding_scale": math.sqrt(values.count("hidden_size"))}


def _gemma2(values: Values) -> Mapping[str, Any]:
    return {
        **_scaled_embedding(values),
        "attention_scale": values.number("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": values.optional("attn_logit_softcapping", 50.0),
        "logit_softcap": values.optional("final_logit_softcapping", 30.0),
    }


def _gemma3(values: Values) -> Mapping[str, Any]:
    return {
        **_scaled_embedding(values),
        "attention_scale": values.number("query_pre_attn_scalar", 256) ** -0.5,
        "logit_softcap": values.optional("final_logit_softcapping"),
    }


_ACTIVATIONS = {None: "gelu_tanh", "gelu": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
"""The first files say gelu and mean its tanh form."""
_AROUND = LayerNorms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
GEMMA = Family(
    unsaid={"tie_word_embeddings": True},
    head_dim=256,
    norm_offset=1.0,
    activations=_ACTIVATIONS,
    more=_scaled_embedding,
)
GEMMA2 = Family(
    unsaid={"tie_word_embeddings": True, "sliding_window": 4096},
    head_dim=256,
    norms=_AROUND,
    norm_offset=1.0,
    activations=_ACTIVATIONS,
    layer_types=_full_every(2),
    more=_gemma2,
)
GEMMA3_TEXT = Family(
    unsaid={
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
    head_dim=256,
    norms=_AROUND,
    norm_offset=1.0,
    head_norm=HeadNorm.EACH_HEAD,
    activations=_ACTIVATIONS,
    layer_types=_full_every(6),
    rope_theta=1e6,
    local_rope_theta=1e4,
    more=_gemma3,
)
GEMMA3 = Nested(
    language_model="gemma3_text",
    namings=(
        Naming(body="model.language_model.", beside=("model.vision_tower.", "model.multi_modal_projector.")),
        Naming(
            body="language_model.model.",
            unembedding="language_model.lm_head.",
            beside=("vision_tower.", "multi_modal_projector."),
        ),
    ),
)
