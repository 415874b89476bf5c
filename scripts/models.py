"""The page of models: `docs/reference/models.md`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainmaster.engine.architectures import FAMILIES, NESTED

INTRODUCTION = """\
# Models of the Tinker cookbook

This page lists the models of `tinker_cookbook.model_info`, which the defaults of all recipes are among, and whether
trainer services and jobs with `framework.type` ENGINE can hold them. `make docs` generates the column `held` from
`trainmaster.engine.architectures`.

The engine knows a model by the value of `model_type` in its `config.json`; [Base
models](../guides/tinker.md#base-models) lists all values that it holds. Other models are refused, and the error lists
these values. Jobs with `framework.type` AUTO or HF_TRAINER train other models with TRL. A model that is held must still
fit into the memory of the trainer's GPU.
"""
INFERRED = """
\\* inferred from the model's size and release: no published `config.json` or class of transformers names the model.
"""


@dataclass(frozen=True, slots=True)
class Model:
    model_type: str
    note: str = ""
    """What of a model is held, and how; what the engine lacks for others."""
    is_inferred: bool = False


_TEXT = "the language model, on text"
_KIMI = f"{_TEXT}; weights of 4 bits are read as 16 bits"
_MAMBA = "layers of Mamba 2, and layers without attention or without an MLP"
_V4 = "compressed attention, several residual streams and routers by hashes"
_INKLING = "short convolutions, and relative positions in attention"
MODELS: Mapping[str, Model] = {
    "meta-llama/Llama-3.1-8B-Instruct": Model("llama"),
    "meta-llama/Llama-3.2-1B": Model("llama"),
    "meta-llama/Llama-3.2-3B": Model("llama"),
    "meta-llama/Llama-3.1-8B": Model("llama"),
    "meta-llama/Llama-3.1-70B": Model("llama"),
    "meta-llama/Llama-3.3-70B-Instruct": Model("llama"),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": Model("qwen3_vl_moe", _TEXT),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": Model("qwen3_vl_moe", _TEXT),
    "Qwen/Qwen3-8B-Base": Model("qwen3"),
    "Qwen/Qwen3-30B-A3B-Base": Model("qwen3_moe"),
    "Qwen/Qwen3-8B": Model("qwen3"),
    "Qwen/Qwen3-32B": Model("qwen3"),
    "Qwen/Qwen3-30B-A3B": Model("qwen3_moe"),
    "Qwen/Qwen3-4B-Instruct-2507": Model("qwen3"),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": Model("qwen3_moe"),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": Model("qwen3_moe"),
    "Qwen/Qwen3.5-4B": Model("qwen3_5", _TEXT),
    "Qwen/Qwen3.5-9B": Model("qwen3_5", _TEXT),
    "Qwen/Qwen3.5-9B-Base": Model("qwen3_5", _TEXT),
    "Qwen/Qwen3.5-27B": Model("qwen3_5", _TEXT),
    "Qwen/Qwen3.5-35B-A3B": Model("qwen3_5_moe", _TEXT),
    "Qwen/Qwen3.5-35B-A3B-Base": Model("qwen3_5_moe", _TEXT),
    "Qwen/Qwen3.5-397B-A17B": Model("qwen3_5_moe", _TEXT),
    "Qwen/Qwen3.6-27B": Model("qwen3_5", _TEXT),
    "Qwen/Qwen3.6-35B-A3B": Model("qwen3_5_moe", _TEXT),
    "Qwen/Qwen3.8-27B": Model("qwen3_5", _TEXT, is_inferred=True),
    "deepseek-ai/DeepSeek-V3.1": Model("deepseek_v3", "weights of 8 bits are read as 16 bits"),
    "deepseek-ai/DeepSeek-V3.1-Base": Model("deepseek_v3", "weights of 8 bits are read as 16 bits"),
    "deepseek-ai/DeepSeek-V4.1-Flash": Model("deepseek_v4", _V4),
    "deepseek-ai/DeepSeek-V4.1-Flash-1017": Model("deepseek_v4", _V4),
    "openai/gpt-oss-20b": Model("gpt_oss", "experts of 4 bits are read as 16 bits"),
    "openai/gpt-oss-120b": Model("gpt_oss", "experts of 4 bits are read as 16 bits"),
    "moonshotai/Kimi-K2-Thinking": Model("kimi_k2", "weights of 4 bits are read as 16 bits"),
    "moonshotai/Kimi-K2.5": Model("kimi_k25", _KIMI),
    "moonshotai/Kimi-K2.6": Model("kimi_k25", _KIMI),
    "zai-org/GLM-5.3": Model("glm_moe_dsa", "sequences up to `index_topk` tokens (2,048)", is_inferred=True),
    "zai-org/GLM-5.3-Flash": Model("glm5_next", "several residual streams, and recurrent layers of another kind"),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": Model("nemotron_h", _MAMBA),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": Model("nemotron_h", _MAMBA),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": Model("nemotron_h", _MAMBA, is_inferred=True),
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": Model("nemotron_h", _MAMBA, is_inferred=True),
    "nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-BF16": Model("nemotron_h_omni", _MAMBA, is_inferred=True),
    "thinkingmachines/Inkling": Model("inkling_mm_model", _INKLING),
    "thinkingmachines/Inkling-Small": Model("inkling_mm_model", _INKLING),
}
"""By the cookbook's names, in its order."""


def is_held(model: Model) -> bool:
    return model.model_type in FAMILIES or model.model_type in NESTED


def models_page() -> str:
    held = sum(is_held(model) for model in MODELS.values())
    lines = [INTRODUCTION, f"{held} of {len(MODELS)} models are held. For others, the notes say what the engine lacks."]
    lines += ["", "| model | `model_type` | held | notes |"]
    lines.append("|---" * 4 + "|")
    for name, model in MODELS.items():
        mark = " \\*" if model.is_inferred else ""
        cells = (name, f"`{model.model_type}`{mark}", "yes" if is_held(model) else "no", model.note)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" + INFERRED
