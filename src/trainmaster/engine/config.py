"""The architecture of a model, read from the config.json of a transformers checkpoint, for all families.

Omitted values have the family's defaults. Unsupported features are refused by name: nearly right trains to nonsense.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainmaster.engine.types import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    theta: float
    kind: str = "default"
    """`default`, `linear`, `llama3` or `yarn`."""
    factor: float = 1.0
    """Slows rotations down, so that a longer context rotates as far as the original one did."""
    original_positions: int = 0
    """The context length before it was extended, for `llama3` and `yarn`."""
    slow_turns: float = 1.0
    """Pairs with fewer turns within the original context are slowed by the whole factor."""
    fast_turns: float = 1.0
    whole_pairs: bool = True
    """Whether both bounds are rounded to whole pairs, for `yarn`."""
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    activation: str
    """`silu` or `gelu_tanh`."""
    tied: bool
    windows: tuple[int | None, ...]
    """For each layer, how many of the last tokens a token sees, including itself; None: all."""
    ropes: tuple[Rope, ...]
    attention_scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    nested: bool = False
    """Whether its checkpoint also has a vision tower, and other names for its weights."""

    @classmethod
    def read(cls, directory: Path) -> ModelConfig:
        path = Path(directory) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise EngineError(f"{directory} is not a transformers checkpoint: it has no config.json") from None
        except (OSError, ValueError) as error:
            raise EngineError(f"{path} cannot be read: {error}") from None
        if not isinstance(raw, dict):
            raise EngineError(f"{path} is not a JSON object")
        return cls.of(raw, path)

    @classmethod
    def of(cls, document: Mapping[str, Any], path: Path) -> ModelConfig:
        try:
            return _from_values(_Values(document, path))
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise EngineError(f"{path} makes no sense: {error}") from None


@dataclass(frozen=True, slots=True)
class _Values:
    """A file's values; errors name the value."""

    raw: Mapping[str, Any]
    path: Path

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise EngineError(f"{self.path}: {name} is {value!r}, not a positive number")
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value):
            raise EngineError(f"{self.path}: {name} is {value!r}, not a whole number")
        return int(value)

    def optional(self, name: str, default: float | None = None) -> float | None:
        value = self.raw.get(name, default)
        return None if value is None else self.number(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        return default if value is None else bool(value)

    def refuse(self, what: str) -> EngineError:
        return EngineError(f"the model in {self.path.parent} cannot be used: {what}")


def _from_values(values: _Values) -> ModelConfig:
    model_type = str(values.raw.get("model_type"))
    known = sorted({*_FAMILIES, *_NESTED})
    if model_type not in known:
        raise values.refuse(f"its architecture {model_type!r} is not among {', '.join(known)}")
    if values.raw.get("quantization_config"):
        raise values.refuse("its weights are quantized (quantization_config); use the checkpoint in 16 or 32 bits")
    if model_type in _NESTED:
        return replace(_from_values(_language_model(values, _NESTED[model_type])), nested=True)
    family = _FAMILIES[model_type]
    values = _Values({**family.unsaid, **values.raw}, values.path)
    if values.flag("use_bidirectional_attention"):
        raise values.refuse("it attends to later tokens too (use_bidirectional_attention)")
    hidden_size, num_heads = values.count("hidden_size"), values.count("num_attention_heads")
    if family.head_dim is None and values.raw.get("head_dim") is None and hidden_size % num_heads:
        raise values.refuse(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    head_dim = values.count("head_dim", family.head_dim or hidden_size // num_heads)
    key_value_heads = values.count("num_key_value_heads", num_heads)
    if num_heads % key_value_heads:
        raise values.refuse(f"{num_heads} attention heads cannot share {key_value_heads} key-value heads evenly")
    if head_dim % 2:
        raise values.refuse(f"its head_dim {head_dim} is odd")
    layer_types = _layer_types(values, family)
    bias = family.qkv_bias or values.flag("attention_bias")
    softcaps = (50.0, 30.0) if model_type == "gemma2" else (None, None)
    attention_softcap = values.optional("attn_logit_softcapping", softcaps[0]) if family.gemma else None
    if attention_softcap is not None and model_type != "gemma2":
        raise values.refuse(f"attn_logit_softcapping is not part of {model_type}")
    pre_attention = values.number("query_pre_attn_scalar", 256) if family.sandwich_norms else head_dim
    window = values.count("sliding_window", 4096) if "sliding_attention" in layer_types else 0
    ropes = _ropes(values, family)
    stretched = [int(rope.original_positions * rope.factor) for rope in ropes.values() if rope.kind == "yarn"]
    return ModelConfig(
        model_type=model_type,
        vocab_size=values.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=values.count("intermediate_size"),
        num_layers=len(layer_types),
        num_heads=num_heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        # Files with yarn often still name the length before it.
        max_positions=max([values.count("max_position_embeddings"), *stretched]),
        norm_eps=values.number("rms_norm_eps", 1e-6),
        activation=_activation(values, family),
        tied=values.flag("tie_word_embeddings", family.gemma),
        windows=tuple(window if each == "sliding_attention" else None for each in layer_types),
        ropes=tuple(ropes[each] for each in layer_types),
        attention_scale=pre_attention**-0.5,
        qkv_bias=bias,
        output_bias=bias and not family.qkv_bias,
        mlp_bias=model_type == "llama" and values.flag("mlp_bias"),
        query_key_norm=family.query_key_norm,
        norm_offset=1.0 if family.gemma else 0.0,
        sandwich_norms=family.sandwich_norms,
        embedding_scale=math.sqrt(hidden_size) if family.gemma else 1.0,
        attention_softcap=attention_softcap,
        logit_softcap=values.optional("final_logit_softcapping", softcaps[1]) if family.sandwich_norms else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Properties of an architecture that its files do not state."""

    head_dim: int | None = None
    """None: the hidden size divided by the number of heads."""
    qkv_bias: bool = False
    query_key_norm: bool = False
    gemma: bool = False
    sandwich_norms: bool = False
    unsaid: Mapping[str, int] = field(default_factory=dict)
    """Sizes that published files leave to the configuration class."""
    full_every: int | None = None
    """Every n-th layer sees everything and the others a window, where the file lists no layer_types."""


_FAMILIES = {
    "llama": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(head_dim=128, query_key_norm=True),
    "gemma": _Family(head_dim=256, gemma=True),
    "gemma2": _Family(head_dim=256, gemma=True, sandwich_norms=True, full_every=2),
    "gemma3_text": _Family(
        head_dim=256,
        gemma=True,
        sandwich_norms=True,
        full_every=6,
        query_key_norm=True,
        unsaid={
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
        },
    ),
}
_NESTED = {"gemma3": "gemma3_text"}
"""Architectures with a vision tower, and the type of their language model."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


def _language_model(values: _Values, model_type: str) -> _Values:
    inner = values.raw.get("text_config")
    if not isinstance(inner, dict):
        raise values.refuse("it has no text_config, which would describe its language model")
    if inner.get("model_type", model_type) != model_type:
        raise values.refuse(f"its language model is of type {inner['model_type']!r}, not {model_type!r}")
    # transformers asks the whole model whether embeddings are tied, and before version 5 its language model.
    outer = values.raw.get("tie_word_embeddings")
    tied = {} if outer is None else {"tie_word_embeddings": outer}
    return _Values({**inner, "model_type": model_type, **tied}, values.path)


def _layer_types(values: _Values, family: _Family) -> list[str]:
    layers = values.count("num_hidden_layers")
    listed = values.raw.get("layer_types")
    if listed is None and family.full_every:
        every = values.count("sliding_window_pattern", family.full_every)
        return [_LAYER_TYPES[bool((layer + 1) % every)] for layer in range(layers)]
    if listed is None:
        windowed = values.flag("use_sliding_window") and values.raw.get("sliding_window") is not None
        first = values.count("max_window_layers", 28) if windowed and values.raw.get("max_window_layers") != 0 else 0
        return [_LAYER_TYPES[windowed and layer >= first] for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers:
        raise EngineError(f"{values.path}: layer_types does not name each of {layers} layers")
    if other := sorted({str(each) for each in listed} - set(_LAYER_TYPES)):
        raise values.refuse(f"it has layers of type {other[0]!r}; those of {' and '.join(_LAYER_TYPES)} are known")
    return listed


def _ropes(values: _Values, family: _Family) -> dict[str, Rope]:
    """The rope of each type of layer. transformers 5 writes rope_parameters, before it rope_theta and rope_scaling."""
    both_kinds = family.full_every == 6
    named: Mapping[str, Any] = values.raw.get("rope_parameters") or {}
    theta = values.number("rope_theta", 1e6 if both_kinds else 1e4)
    scaling: Mapping[str, Any] = values.raw.get("rope_scaling") or {}
    if values.number("partial_rotary_factor", 1.0) != 1.0:
        raise values.refuse("positions turn only a part of each head (partial_rotary_factor)")
    if not both_kinds:
        rope = _rope(values, {"rope_theta": theta, **scaling, **named})
        return dict.fromkeys(_LAYER_TYPES, rope)
    local = {"rope_theta": values.number("rope_local_base_freq", 1e4)}
    return {
        "full_attention": _rope(values, {"rope_theta": theta, **scaling, **(named.get("full_attention") or {})}),
        "sliding_attention": _rope(values, {**local, **(named.get("sliding_attention") or {})}),
    }


def _rope(values: _Values, parameters: Mapping[str, Any]) -> Rope:
    inner = _Values(parameters, values.path)
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if inner.number("partial_rotary_factor", 1.0) != 1.0:
        raise values.refuse("positions turn only a part of each head (partial_rotary_factor)")
    theta = inner.number("rope_theta")
    # Dynamic scaling begins beyond max_position_embeddings, which no sequence passes here.
    if kind in ("default", "dynamic"):
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=inner.number("factor"))
    if kind not in ("llama3", "yarn"):
        raise values.refuse(
            f"its rope scaling is of type {kind!r}; default, linear, dynamic, llama3 and yarn are known"
        )
    positions = values.count("max_position_embeddings")
    # The file's own word comes before that of its rope: transformers reads them so.
    outer = values if values.raw.get("original_max_position_embeddings") else inner
    original = outer.count("original_max_position_embeddings", positions)
    if kind == "llama3":
        factor, slow, fast = (inner.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    else:
        factor = inner.number("factor", positions / original)
        slow, fast = inner.number("beta_slow", 1.0), inner.number("beta_fast", 32.0)
    if slow >= fast:
        raise values.refuse(
            f"rope: the low-frequency bound ({slow:g}) must be below the high-frequency bound ({fast:g})"
        )
    return Rope(
        theta=theta,
        kind=kind,
        factor=factor,
        original_positions=original,
        slow_turns=slow,
        fast_turns=fast,
        whole_pairs=inner.flag("truncate", default=True),
        magnitude=_magnitude(inner, factor) if kind == "yarn" else 1.0,
    )


def _magnitude(yarn: _Values, factor: float) -> float:
    """The value in the file, or what yarn's authors recommend for a factor."""
    given = yarn.optional("attention_factor")
    if given is not None:
        return given

    def best(weight: float) -> float:
        return 1.0 + 0.1 * weight * math.log(max(factor, 1.0))

    above, below = yarn.optional("mscale"), yarn.optional("mscale_all_dim")
    return best(above) / best(below) if above and below else best(1.0)


def _activation(values: _Values, family: _Family) -> str:
    name = values.raw.get("hidden_activation") or values.raw.get("hidden_act")
    if family.gemma:
        # The first Gemma files say gelu and mean its tanh form.
        known = {None: "gelu_tanh", "gelu": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
    else:
        known = {None: "silu", "silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if name not in known:
        raise values.refuse(f"its activation {name!r} is not known")
    return known[name]
