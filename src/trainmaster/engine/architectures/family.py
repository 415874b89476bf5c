"""What an architecture has that Llama has not: one table for each family, read with the values of a config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from trainmaster.engine.architectures.naming import ALONE, Naming
from trainmaster.engine.config_values import Values

FULL = "full_attention"
SLIDING = "sliding_attention"
INDEXED = "indexed_attention"
"""To the rows that an indexer finds most relevant, as many as it may; there is no indexer here."""
LINEAR = "linear_attention"


class Bias(Enum):
    NEVER = 0
    ALWAYS = 1
    IF_SAID = 2
    """If `attention_bias` is true, or `mlp_bias`."""


class HeadNorm(Enum):
    """What the norm of queries and keys is taken over."""

    EACH_HEAD = 0
    ALL_HEADS = 1


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The names of a layer's norms; None: there is none at this place."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


def windowed_if_said(values: Values) -> list[str]:
    """A window in the layers from `max_window_layers` on, if `use_sliding_window` is true."""
    windowed = values.flag("use_sliding_window") and values.raw.get("sliding_window") is not None
    first = values.count("max_window_layers", 28) if windowed and values.raw.get("max_window_layers") != 0 else 0
    return [SLIDING if windowed and layer >= first else FULL for layer in range(values.count("num_hidden_layers"))]


def windowed_everywhere(values: Values) -> list[str]:
    """A window in all layers, if `sliding_window` is not null."""
    kind = FULL if values.raw.get("sliding_window") is None else SLIDING
    return [kind] * values.count("num_hidden_layers")


def windowless(values: Values) -> list[str]:
    return [FULL] * values.count("num_hidden_layers")


def nothing_more(_: Values) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties of an architecture that its files do not state; the defaults are those of Llama."""

    unsaid: Mapping[str, Any] = field(default_factory=dict)
    """Values that files leave to the configuration class, where it does not have Llama's."""
    head_dim: int | None = None
    """None: the hidden size divided by the number of heads."""
    head_dim_name: str = "head_dim"
    """How files call it."""
    norms: LayerNorms = LayerNorms()
    norm_offset: float = 0.0
    """Norms multiply by this and the weight."""
    head_norm: HeadNorm | None = None
    qkv_bias: Bias = Bias.IF_SAID
    output_bias: Bias = Bias.IF_SAID
    mlp_bias: Bias = Bias.NEVER
    fused_qkv: bool = False
    """Whether queries, keys and values are one product, `qkv_proj`."""
    fused_gate_up: bool = False
    """Whether gate and up are one product, `gate_up_proj`."""
    activations: Mapping[str | None, str] = field(
        default_factory=lambda: {None: "silu", "silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    )
    """What names in files mean; None: no name."""
    layer_types: Callable[[Values], Sequence[str]] = windowed_if_said
    """The type of each layer, where a file has no `layer_types`."""
    kinds: Sequence[str] = (FULL, SLIDING)
    """The types that layers may have."""
    rope_theta: float = 1e4
    rope_unsaid: Mapping[str, Any] = field(default_factory=dict)
    """The rope of files that say nothing about it."""
    local_rope_theta: float | None = None
    """Layers with a window have a rope of their own, with this default."""
    rope_interleaved: bool = False
    """Positions turn neighbours in a head, instead of elements half a head apart."""
    rope_names: Mapping[str, str] = field(default_factory=dict)
    """What kinds of ropes are called in older files."""
    rotary_share: float | None = None
    """The default of `partial_rotary_factor`; None: positions turn whole heads."""
    turned: Callable[[Values], Sequence[bool]] | None = None
    """Whether positions turn the heads of each layer; None: of all layers."""
    quantized: Sequence[str] = ()
    """The methods of quantization that are undone when weights are read."""
    beside: tuple[str, ...] = ()
    """How names of weights begin that are in checkpoints, and are not used."""
    more: Callable[[Values], Mapping[str, Any]] = nothing_more
    """Fields of `ModelConfig` that only this family has, or reads in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    """An architecture with other parts beside its language model."""

    language_model: str
    """The type of the language model."""
    namings: tuple[Naming, ...] = (ALONE,)
    """How weights may be named, the names of transformers' modules first."""
