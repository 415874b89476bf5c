"""What tests of the kernels share: on a GPU, or slowly in Triton's interpreter on the CPU; else they are skipped.

`test_engine_interpreted` runs them in the interpreter, in a process of its own. By hand, with a file's name at the end:
`TRITON_INTERPRET=1 PYTHONPATH=$(echo .venvs/triton/lib/python3*/site-packages) .venv/bin/python -m pytest`
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("Triton needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
if INTERPRETED:
    from triton.runtime import interpreter

    @functools.cache
    def _prepare(function: Callable[..., Any]) -> None:
        interpreter._patch_lang(function)

    def _call(function: Any, *given: Any, **named: Any) -> Any:
        """As the interpreter calls a function within a kernel, but for what it does each time anew, and takes long."""
        _prepare(function.fn)
        return function.rewrite()(*given, **named)

    interpreter.InterpretedFunction.__call__ = _call

from trainmaster.engine.config import ModelConfig  # noqa: E402
from trainmaster.engine.model import Transformer  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
TYPES = [torch.float32, *([] if INTERPRETED else [torch.bfloat16])]
DIGITS = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
"""How far results may lie from those in float64, of their length."""


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def apart(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    ours, theirs = ours.detach().double(), theirs.detach().double()
    assert ours.isfinite().all()
    return float((ours - theirs).norm() / theirs.norm())


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {"attention_bias": True},
    "gemma2": {"query_pre_attn_scalar": 24, "sliding_window": 4},
    "gemma3_text": {"query_pre_attn_scalar": 24, "sliding_window": 4},
    "glm4": {},
    "granite": {"residual_multiplier": 0.5},
    "olmo2": {},
    "phi3": {"pad_token_id": 0},
    "smollm3": {},
}


def a_model(kind: str) -> Transformer:
    """Of random weights, without a checkpoint."""
    sizes = {
        "vocab_size": 70,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    config = ModelConfig.of({"model_type": kind, **sizes, **FAMILIES[kind]}, Path("config.json"))
    model = Transformer(config).to_empty(device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() > 1 else 1))
    return model
