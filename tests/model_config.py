"""What the `config.json` of a model says that a trainer can hold."""

from __future__ import annotations

from typing import Any


def model_config(**changes: Any) -> dict[str, Any]:
    """A Qwen3 of one layer, but for the changes."""
    return {
        "model_type": "qwen3",
        "vocab_size": 8,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        **changes,
    }
