"""The products of a model that adapters may adapt, by name, with the shapes of their weights."""

from __future__ import annotations

from collections.abc import Iterator

from trainmaster.engine.config import ModelConfig
from trainmaster.engine.types import LoraOptions

UNEMBEDDING = "lm_head"
ATTENTION = "self_attn"
MLP = "mlp"
_BODY = "model.layers."


def target_shapes(config: ModelConfig, options: LoraOptions) -> dict[str, tuple[int, int]]:
    """The adapted products and the shapes of their weights: (out, in)."""
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(config.num_layers):
        if options.train_attn:
            shapes |= {f"{_BODY}{layer}.{ATTENTION}.{name}": size for name, size in attention_shapes(config)}
        if options.train_mlp:
            shapes |= {f"{_BODY}{layer}.{MLP}.{name}": size for name, size in mlp_shapes(config)}
    if options.train_unembed:
        shapes[UNEMBEDDING] = (config.vocab_size, config.hidden_size)
    return shapes


def attention_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden = config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    if config.fused_qkv:
        yield "qkv_proj", (queries + 2 * keys, hidden)
    else:
        yield from (("q_proj", (queries, hidden)), ("k_proj", (keys, hidden)), ("v_proj", (keys, hidden)))
    yield "o_proj", (hidden, queries)


def mlp_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    if config.fused_gate_up:
        yield "gate_up_proj", (2 * inner, hidden)
    else:
        yield from (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)))
    yield "down_proj", (hidden, inner)


def part_of(target: str) -> str:
    """Which part of the model a target belongs to: ATTENTION, MLP or UNEMBEDDING."""
    return target.split(".")[3] if target.startswith(_BODY) else target
