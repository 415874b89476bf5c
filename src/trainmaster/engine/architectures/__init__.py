"""The architectures that the engine holds, by the `model_type` of their config.json; a file has one family's table."""

from __future__ import annotations

from collections.abc import Mapping

from trainmaster.engine.architectures.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, KIMI_K25
from trainmaster.engine.architectures.family import Family, Nested
from trainmaster.engine.architectures.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_TEXT
from trainmaster.engine.architectures.glm import GLM4, GLM4_MOE, GLM_MOE_DSA
from trainmaster.engine.architectures.gpt_oss import GPT_OSS
from trainmaster.engine.architectures.granite import GRANITE
from trainmaster.engine.architectures.llama import LLAMA
from trainmaster.engine.architectures.mistral import MISTRAL, MIXTRAL
from trainmaster.engine.architectures.olmo import OLMO2
from trainmaster.engine.architectures.phi3 import PHI3
from trainmaster.engine.architectures.qwen import (
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    QWEN3_VL,
    QWEN3_VL_MOE,
    QWEN3_VL_MOE_TEXT,
    QWEN3_VL_TEXT,
)
from trainmaster.engine.architectures.qwen_next import (
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_5_MOE_TEXT,
    QWEN3_5_TEXT,
    QWEN3_NEXT,
)
from trainmaster.engine.architectures.smollm import SMOLLM3

FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3_TEXT,
    "glm4": GLM4,
    "glm4_moe": GLM4_MOE,
    "glm_moe_dsa": GLM_MOE_DSA,
    "gpt_oss": GPT_OSS,
    "granite": GRANITE,
    "kimi_k2": DEEPSEEK_V3,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "olmo2": OLMO2,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
    "qwen3_5_text": QWEN3_5_TEXT,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_vl_moe_text": QWEN3_VL_MOE_TEXT,
    "qwen3_vl_text": QWEN3_VL_TEXT,
    "smollm3": SMOLLM3,
}
NESTED: Mapping[str, Nested] = {
    "gemma3": GEMMA3,
    "kimi_k25": KIMI_K25,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL_MOE,
}
"""Architectures with other parts, such as a vision tower, beside a language model of `FAMILIES`."""
