"""Tiny checkpoints of random weights, made on the spot, and what transformers computes with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from data_tokenizer import make_tokenizer
from trainmaster.engine.architectures import NESTED

VOCABULARY = 272
"""More than the test tokenizer's 263 tokens, as in real models."""
NULL: Any = object()
"""Written as null; None leaves a value out."""
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Norms and products of the usual size would hardly tell one mistake from none.
    "initializer_range": 0.15,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0],
    "long_factor": [1.0, 3.0, 5.0, 7.0, 9.0, 11.0],
    "original_max_position_embeddings": 200,
    "partial_rotary_factor": 0.75,
}
GEMMA3: dict[str, Any] = {
    "sliding_window": 5,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 900.0, "factor": 4.0},
    },
}
MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
RECURRENT: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    **EXPERTS,
    # The norms of latent vectors have one of their own.
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
INDEXED: dict[str, Any] = {"index_topk": 400, "index_head_dim": 16, "index_n_heads": 2}
QWEN_VISION: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "depth": 1,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
    "image_token_id": 270,
    "video_token_id": 271,
    "vision_start_token_id": 268,
    "vision_end_token_id": 269,
}
VISION: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    },
    "mm_tokens_per_image": 4,
    "boi_token_index": 268,
    "eoi_token_index": 269,
    "image_token_index": 270,
}
"""What is beside the language model of `gemma3`."""
KIMI_VISION: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 4,
        "pos_emb_height": 4,
        "pos_emb_width": 4,
    },
    "projection_hidden_size": 16,
    "image_token_id": 270,
    "video_token_id": 271,
    "vision_start_token_id": 268,
    "vision_end_token_id": 269,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_untied": ("qwen3", {"tie_word_embeddings": False, "attention_bias": True}),
    "qwen2": ("qwen2", {"head_dim": None, "tie_word_embeddings": False}),
    "qwen2_windowed": (
        "qwen2",
        {"head_dim": None, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}),
    "llama_dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}),
    "qwen3_yarn": ("qwen3", {"rope_parameters": YARN_ROPE}),
    "qwen2_yarn": (
        "qwen2",
        {
            "head_dim": None,
            "rope_parameters": YARN_ROPE | {"beta_fast": 8, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.4},
        },
    ),
    "llama_yarn": (
        "llama",
        {"rope_parameters": YARN_ROPE | {"attention_factor": 1.3, "truncate": False, "beta_fast": 20}},
    ),
    "gemma": ("gemma", {"num_key_value_heads": 1}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3_text": ("gemma3_text", GEMMA3),
    "gemma3": ("gemma3", GEMMA3),
    "mistral": ("mistral", {"sliding_window": 5}),
    "mistral_full": ("mistral", {"sliding_window": NULL, "tie_word_embeddings": True}),
    "phi3": ("phi3", {"head_dim": None, "pad_token_id": NULL, "sliding_window": 30}),
    "phi3_longrope": (
        "phi3",
        {"head_dim": None, "pad_token_id": NULL, "rope_parameters": LONGROPE, "original_max_position_embeddings": 200},
    ),
    "olmo2": ("olmo2", {"head_dim": None, "pad_token_id": NULL, "attention_bias": True}),
    "smollm3": ("smollm3", {"head_dim": None, "pad_token_id": NULL, "no_rope_layers": [1, 0, 1]}),
    "smollm3_windowed": (
        "smollm3",
        {
            "head_dim": None,
            "pad_token_id": NULL,
            "use_sliding_window": True,
            "sliding_window": 5,
            "no_rope_layer_interval": 2,
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.3,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen3_moe_mixed": (
        "qwen3_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_vl": ("qwen3_vl", {"rope_parameters": MROPE}),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {"rope_parameters": MROPE, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **RECURRENT,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5": ("qwen3_5", {**RECURRENT, "rope_parameters": MROPE | {"partial_rotary_factor": 0.5}}),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {
            **RECURRENT,
            "rope_parameters": MROPE | {"partial_rotary_factor": 0.5},
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 30}),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "sliding_window": 20,
            "rope_parameters": YARN_ROPE | {"truncate": False},
            "swiglu_limit": 1.5,
        },
    ),
    "glm4": ("glm4", {"pad_token_id": NULL}),
    "deepseek_v2": ("deepseek_v2", {**LATENT, "q_lora_rank": NULL, "num_experts_per_tok": 3, "n_shared_experts": 2}),
    "deepseek_v2_groups": (
        "deepseek_v2",
        {
            **LATENT,
            "rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.7},
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "mlp_bias": False,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**LATENT, "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.4}, "attention_bias": True},
    ),
    "deepseek_v3_ungrouped": (
        "deepseek_v3",
        {**LATENT, "q_lora_rank": NULL, "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "v_head_dim": 28},
    ),
    "deepseek_v32": ("deepseek_v32", {**LATENT, **INDEXED, "rope_parameters": YARN_ROPE | {"mscale_all_dim": 1.0}}),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {**LATENT, **INDEXED, "n_group": 1, "topk_group": 1, "indexer_types": ["full", "shared", "full"]},
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            **EXPERTS,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.6,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "kimi_k25": ("kimi_k25", {**LATENT, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.8}),
}
"""Name -> transformers' model type, and what its configuration says beside COMMON."""


BESIDE = {
    "gemma3": VISION,
    "kimi_k25": KIMI_VISION,
    "qwen3_5": QWEN_VISION,
    "qwen3_5_moe": QWEN_VISION,
    "qwen3_vl": QWEN_VISION,
    "qwen3_vl_moe": QWEN_VISION,
}
"""What is beside the language models of architectures that have other parts."""


def _auto_class(model_type: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if model_type in BESIDE else AutoModelForCausalLM


def make_checkpoint(
    directory: Path, kind: str = "qwen3", *, seed: int = 0, shard_size: str = "5GB", **changes: Any
) -> Path:
    """Write a checkpoint of a kind, with a tokenizer; `changes` are of its configuration. Returns the directory."""
    from transformers import AutoConfig

    model_type, settings = KINDS[kind]
    settings = {name: value for name, value in (COMMON | settings | changes).items() if value is not None}
    settings = {name: None if value is NULL else value for name, value in settings.items()}
    if model_type in BESIDE:
        tied = {"tie_word_embeddings": settings.get("tie_word_embeddings", True)}
        nested = {"model_type": NESTED[model_type].language_model} | settings
        settings = BESIDE[model_type] | {"text_config": nested} | tied
    config = AutoConfig.for_model(model_type, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _auto_class(model_type).from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            # Norms and biases begin at one value each: no test would see one that is left out.
            if parameter.dim() == 1 or name.endswith("_bias"):
                torch.nn.init.normal_(parameter, mean=0.0 if "bias" in name else 0.6, std=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=0.3)
    # transformers 5.22 would write "blocks" for the layers of a kimi_k25.
    model.save_pretrained(directory, max_shard_size=shard_size, save_original_format=kind != "kimi_k25")
    make_tokenizer().save_pretrained(directory)
    return directory


def reference(directory: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of a checkpoint, with attention and experts that are written out in Python."""
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return _auto_class(model_type).from_pretrained(directory, dtype=dtype, **plain).eval()


def random_tokens(length: int, seed: int = 0) -> torch.Tensor:
    """int64 [length], none of them special."""
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))
