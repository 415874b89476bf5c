"""The architecture of a model, read from the config.json of a transformers checkpoint, for all families.

Omitted values have the family's defaults. Unsupported features are refused by name: nearly right trains to nonsense.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainmaster.engine.architectures import FAMILIES, NESTED
from trainmaster.engine.architectures.family import SLIDING, Bias, Family, HeadNorm, LayerNorms, Nested
from trainmaster.engine.architectures.latent import Latent
from trainmaster.engine.architectures.linear import LinearAttention
from trainmaster.engine.architectures.mixtures import Mixture
from trainmaster.engine.architectures.quantization import lacks
from trainmaster.engine.config_values import Values
from trainmaster.engine.ropes import Rope, read_ropes
from trainmaster.engine.types import EngineError


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
    """Of queries, keys and values; with latent ones, of the part that positions turn."""
    max_positions: int
    norm_eps: float
    activation: str
    """`silu` or `gelu_tanh`."""
    tied: bool
    windows: tuple[int | None, ...]
    """For each layer, how many of the last tokens a token sees, including itself; None: all."""
    ropes: tuple[Rope | None, ...]
    """For each layer, how positions turn its queries and keys; None: they do not."""
    attention_scale: float
    norms: LayerNorms
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_qkv: bool = False
    fused_gate_up: bool = False
    head_norm: HeadNorm | None = None
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Multiplies what attention and MLP add."""
    logit_divisor: float = 1.0
    attention_softcap: float | None = None
    attention_sinks: bool = False
    logit_softcap: float | None = None
    gated_attention: bool = False
    """Whether what is attended to passes a gate, which comes with the queries."""
    mixture: Mixture | None = None
    linear: LinearAttention | None = None
    latent: Latent | None = None
    beside: tuple[str, ...] = ()
    """How names of weights begin that are in the checkpoint, and are not used."""
    nested: Nested | None = None
    """The model's own architecture, if it has other parts beside the language model."""

    @property
    def attends(self) -> tuple[bool, ...]:
        """For each layer, whether it attends; others have a recurrent state."""
        return tuple(not recurs for recurs in self.linear.layers) if self.linear else (True,) * self.num_layers

    @property
    def key_width(self) -> int:
        """Of the queries and keys that attention sees."""
        return self.latent.key_width if self.latent else self.head_dim

    @property
    def value_width(self) -> int:
        return self.latent.value_width if self.latent else self.head_dim

    @property
    def cached_windows(self) -> tuple[int | None, ...]:
        """The windows of the layers that have keys and values."""
        return tuple(window for window, attends in zip(self.windows, self.attends, strict=True) if attends)

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
            return _from_values(Values(document, path))
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise EngineError(f"{path} makes no sense: {error}") from None


def _from_values(values: Values) -> ModelConfig:
    model_type = str(values.raw.get("model_type"))
    known = sorted({*FAMILIES, *NESTED})
    if model_type not in known:
        raise values.refuse(f"its architecture {model_type!r} is not among {', '.join(known)}")
    if quantization := values.raw.get("quantization_config"):
        _check_quantization(values, model_type, quantization)
    if model_type in NESTED:
        nested = NESTED[model_type]
        return replace(_from_values(_language_model(values, nested.language_model)), nested=nested)
    family = FAMILIES[model_type]
    values = Values({**family.unsaid, **values.raw}, values.path)
    if values.flag("use_bidirectional_attention"):
        raise values.refuse("it attends to later tokens too (use_bidirectional_attention)")
    config = _plain(values, model_type, family)
    config = replace(config, **{"beside": family.beside, **family.more(values)})
    if config.attention_softcap is None and values.raw.get("attn_logit_softcapping") is not None:
        raise values.refuse(f"attn_logit_softcapping is not part of {model_type}")
    return config


def _check_quantization(values: Values, model_type: str, quantization: Mapping[str, Any]) -> None:
    language_model = NESTED[model_type].language_model if model_type in NESTED else model_type
    problem = "use the checkpoint in 16 or 32 bits"
    if quantization.get("quant_method") in FAMILIES[language_model].quantized:
        problem = lacks(quantization) or ""
    if problem:
        raise values.refuse(f"its weights are quantized (quantization_config): {problem}")


def _plain(values: Values, model_type: str, family: Family) -> ModelConfig:
    """What all families read in the same way."""
    hidden_size, num_heads = values.count("hidden_size"), values.count("num_attention_heads")
    if family.head_dim is None and values.raw.get(family.head_dim_name) is None and hidden_size % num_heads:
        raise values.refuse(f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    head_dim = values.count(family.head_dim_name, family.head_dim or hidden_size // num_heads)
    key_value_heads = values.count("num_key_value_heads", num_heads)
    if num_heads % key_value_heads:
        raise values.refuse(f"{num_heads} attention heads cannot share {key_value_heads} key-value heads evenly")
    if head_dim % 2:
        raise values.refuse(f"its {family.head_dim_name} {head_dim} is odd")
    layer_types = _layer_types(values, family)
    window = values.count("sliding_window", 4096) if SLIDING in layer_types else 0
    ropes = read_ropes(values, family, head_dim)
    turned = family.turned(values) if family.turned else [True] * len(layer_types)
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
        tied=values.flag("tie_word_embeddings"),
        windows=tuple(window if each == SLIDING else None for each in layer_types),
        ropes=tuple(ropes.get(kind) if turns else None for kind, turns in zip(layer_types, turned, strict=True)),
        attention_scale=head_dim**-0.5,
        qkv_bias=_bias(family.qkv_bias, values, "attention_bias"),
        output_bias=_bias(family.output_bias, values, "attention_bias"),
        mlp_bias=_bias(family.mlp_bias, values, "mlp_bias"),
        fused_qkv=family.fused_qkv,
        fused_gate_up=family.fused_gate_up,
        head_norm=family.head_norm,
        norms=family.norms,
        norm_offset=family.norm_offset,
    )


def _language_model(values: Values, model_type: str) -> Values:
    inner = values.raw.get("text_config")
    if not isinstance(inner, dict):
        raise values.refuse("it has no text_config, which would describe its language model")
    if FAMILIES.get(inner.get("model_type", model_type)) is not FAMILIES[model_type]:
        raise values.refuse(f"its language model is of type {inner['model_type']!r}, not {model_type!r}")
    # transformers asks the whole model whether embeddings are tied, and before version 5 its language model.
    outer = values.raw.get("tie_word_embeddings")
    tied = {} if outer is None else {"tie_word_embeddings": outer}
    return Values({**inner, "model_type": model_type, **tied}, values.path)


def _layer_types(values: Values, family: Family) -> list[str]:
    layers = values.count("num_hidden_layers")
    listed = values.raw.get("layer_types")
    if listed is None:
        return list(family.layer_types(values))
    if not isinstance(listed, list) or len(listed) != layers:
        raise EngineError(f"{values.path}: layer_types does not name each of {layers} layers")
    if other := sorted({str(each) for each in listed} - set(family.kinds)):
        raise values.refuse(f"it has layers of type {other[0]!r}; those of {' and '.join(family.kinds)} are known")
    return listed


def _bias(bias: Bias, values: Values, name: str) -> bool:
    return bias is Bias.ALWAYS or (bias is Bias.IF_SAID and values.flag(name))


def _activation(values: Values, family: Family) -> str:
    name = values.raw.get("hidden_activation") or values.raw.get("hidden_act")
    if name not in family.activations:
        raise values.refuse(f"its activation {name!r} is not known")
    return family.activations[name]
