"""The products of a model that adapters may adapt, by name, with the shapes of their weights."""

from __future__ import annotations

from collections.abc import Iterator

from trainmaster.engine.architectures.latent import Latent
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.types import LoraOptions

UNEMBEDDING = "lm_head"
ATTENTION = "self_attn"
LINEAR = "linear_attn"
MLP = "mlp"
_BODY = "model.layers."


def target_shapes(config: ModelConfig, options: LoraOptions) -> dict[str, tuple[int, ...]]:
    """The adapted products and the shapes of their weights: (out, in), of experts (experts, out, in)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(config.num_layers):
        if options.train_attn:
            module = ATTENTION if config.attends[layer] else LINEAR
            sizes = attention_shapes(config) if config.attends[layer] else _linear_shapes(config)
            shapes |= {f"{_BODY}{layer}.{module}.{name}": size for name, size in sizes}
        if options.train_mlp:
            shapes |= {f"{_BODY}{layer}.{MLP}.{name}": size for name, size in mlp_shapes(config, layer)}
    if options.train_unembed:
        shapes[UNEMBEDDING] = (config.vocab_size, config.hidden_size)
    return shapes


def attention_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, latent = config.hidden_size, config.latent
    if latent is not None:
        yield from _latent_shapes(config, latent)
        return
    queries, keys = config.num_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    if config.fused_qkv:
        yield "qkv_proj", (queries + 2 * keys, hidden)
    else:
        asked = 2 * queries if config.gated_attention else queries
        yield from (("q_proj", (asked, hidden)), ("k_proj", (keys, hidden)), ("v_proj", (keys, hidden)))
    yield "o_proj", (hidden, queries)


def _latent_shapes(config: ModelConfig, latent: Latent) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, heads, rank = config.hidden_size, config.num_heads, latent.query_rank
    yield ("q_proj", (heads * latent.key_width, hidden)) if rank is None else ("q_a_proj", (rank, hidden))
    yield "kv_a_proj_with_mqa", (latent.rank + latent.turned_width, hidden)
    if rank is not None:
        yield "q_b_proj", (heads * latent.key_width, rank)
    yield "kv_b_proj", (heads * (latent.plain_width + latent.value_width), latent.rank)
    yield "o_proj", (hidden, heads * latent.value_width)


def _linear_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    linear, hidden = config.linear, config.hidden_size
    if linear is None:
        return
    if linear.by_key_head:
        yield "in_proj_qkvz", (linear.mixed + linear.values, hidden)
    else:
        yield from (("in_proj_qkv", (linear.mixed, hidden)), ("in_proj_z", (linear.values, hidden)))
    yield "out_proj", (hidden, linear.values)


def mlp_shapes(config: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    mixture, hidden = config.mixture, config.hidden_size
    if mixture is None or not mixture.layers[layer]:
        yield from _mlp_shapes(hidden, config.intermediate_size, fused=config.fused_gate_up)
        return
    for name, size in _mlp_shapes(hidden, mixture.width, fused=False):
        yield f"experts.{name}", (mixture.experts, *size)
    if mixture.shared_width:
        for name, size in _mlp_shapes(hidden, mixture.shared_width, fused=False):
            yield f"{mixture.shared}.{name}", size


def _mlp_shapes(hidden: int, inner: int, *, fused: bool) -> Iterator[tuple[str, tuple[int, int]]]:
    if fused:
        yield "gate_up_proj", (2 * inner, hidden)
    else:
        yield from (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)))
    yield "down_proj", (hidden, inner)


def part_of(target: str) -> str:
    """Which part of the model a target belongs to: ATTENTION, MLP or UNEMBEDDING."""
    if not target.startswith(_BODY):
        return target
    part = target.split(".")[3]
    return ATTENTION if part == LINEAR else part


def targets_within(parameter: str) -> tuple[str, ...]:
    """The targets whose weights a parameter has, one below the other."""
    target = parameter.removesuffix(".weight")
    experts, _, kind = target.rpartition(".")
    if experts.endswith(".experts") and kind == "gate_up_proj":
        return f"{experts}.gate_proj", f"{experts}.up_proj"
    return (target,)
