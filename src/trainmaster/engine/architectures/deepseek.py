"""DeepSeek V2 and V3, and Kimi K2, which is a DeepSeek V3: latent keys and values, and experts in groups.

DeepSeek V3.2 and GLM 5 attend to the `index_topk` tokens alone that an indexer finds most relevant. Of a sequence that
is no longer these are all tokens: such sequences are held, and the indexer is not used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from trainmaster.engine.architectures.family import FULL, INDEXED, Bias, Family, Nested, windowless
from trainmaster.engine.architectures.latent import Latent
from trainmaster.engine.architectures.mixtures import ExpertGroups, Mixture, Scores
from trainmaster.engine.architectures.naming import Naming
from trainmaster.engine.config_values import Values


def _attention(values: Values) -> Mapping[str, Any]:
    if not values.flag("rope_interleave", default=True):
        raise values.refuse("positions turn halves of a head instead of neighbours (rope_interleave)")
    heads = values.count("num_attention_heads")
    if values.count("num_key_value_heads", heads) != heads:
        raise values.refuse("its heads share keys and values (num_key_value_heads), which a latent vector has for each")
    latent = Latent(
        query_rank=values.count("q_lora_rank", 1536) if values.raw.get("q_lora_rank", 1536) is not None else None,
        rank=values.count("kv_lora_rank", 512),
        plain_width=values.count("qk_nope_head_dim", 128),
        turned_width=values.count("qk_rope_head_dim", 64),
        value_width=values.count("v_head_dim", 128),
    )
    scale = latent.key_width**-0.5 * _sharpness(values)
    return {"latent": latent, "attention_scale": scale, "beside": layers_beside(values)}


def layers_beside(values: Values) -> tuple[str, ...]:
    """What is published also has layers that predict several tokens, after the others."""
    return (f"model.layers.{values.count('num_hidden_layers')}.",)


def indexed(values: Values, *, groups: tuple[int, int]) -> Mapping[str, Any]:
    """DeepSeek V3 with an indexer in its layers, up to the length where it would leave tokens out."""
    plain = _v3(values, groups=groups)
    indexers = (f"model.layers.{layer}.self_attn.indexer." for layer in range(values.count("num_hidden_layers")))
    longest = min(values.count("max_position_embeddings"), values.count("index_topk", 2048))
    return {**plain, "beside": (*plain["beside"], *indexers), "max_positions": longest}


def _sharpness(values: Values) -> float:
    """What yarn's `mscale_all_dim` multiplies scores by."""
    scaling = values.raw.get("rope_parameters") or values.raw.get("rope_scaling") or {}
    inner = Values(scaling, values.path)
    if scaling.get("rope_type", scaling.get("type", "default")) == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    factor = inner.number("factor", 1.0)
    return (1.0 + 0.1 * inner.number("mscale_all_dim") * math.log(max(factor, 1.0))) ** 2


def _mixed_layers(values: Values, *, first: int) -> tuple[bool, ...]:
    if (types := values.raw.get("mlp_layer_types")) is not None:
        return tuple(each == "sparse" for each in types)
    if values.count("moe_layer_freq", 1) != 1:
        raise values.refuse("layers with and without experts take turns (moe_layer_freq)")
    first = values.natural("first_k_dense_replace", first)
    return tuple(layer >= first for layer in range(values.count("num_hidden_layers")))


def _expect(values: Values, name: str, *known: str) -> str:
    said = str(values.raw.get(name, known[0]))
    if said not in known:
        raise values.refuse(f"its {name} is {said!r}, not {' or '.join(known)}")
    return said


def _groups(values: Values, count: int, chosen: int, *, best: int) -> ExpertGroups | None:
    if count == 1:
        return None
    experts = values.count_of("n_routed_experts", "num_local_experts", default=256)
    if experts % count or experts // count < best or chosen > count:
        raise values.refuse(f"{experts} experts are not {count} groups of which {chosen} can be chosen")
    return ExpertGroups(count=count, chosen=chosen, best=best)


def balanced_mixture(
    values: Values,
    *,
    groups: tuple[int, int],
    experts: int = 256,
    width: int = 2048,
    first: int = 3,
    scale: float = 2.5,
) -> Mixture:
    """Experts that are chosen by sigmoids and a bias that balances them; with the defaults of a configuration class."""
    _expect(values, "scoring_func", "sigmoid")
    _expect(values, "topk_method", "noaux_tc")
    width = values.count("moe_intermediate_size", width)
    count, chosen = values.count("n_group", groups[0]), values.count("topk_group", groups[1])
    return Mixture(
        layers=_mixed_layers(values, first=first),
        experts=values.count_of("n_routed_experts", "num_local_experts", default=experts),
        chosen=values.count("num_experts_per_tok", 8),
        width=width,
        scores=Scores.SIGMOID,
        corrected=True,
        groups=_groups(values, count, chosen, best=2),
        normalized=values.flag("norm_topk_prob", default=True),
        scale=values.number("routed_scaling_factor", scale),
        exact=True,
        shared="shared_experts",
        shared_width=values.count("n_shared_experts", 1) * width,
    )


def _v3(values: Values, *, groups: tuple[int, int] = (8, 4)) -> Mapping[str, Any]:
    return {**_attention(values), "mixture": balanced_mixture(values, groups=groups)}


def _v2(values: Values) -> Mapping[str, Any]:
    _expect(values, "scoring_func", "softmax")
    method = _expect(values, "topk_method", "greedy", "group_limited_greedy")
    if values.flag("norm_topk_prob"):
        raise values.refuse("the weights of its experts add up to 1 (norm_topk_prob), which transformers ignores")
    width = values.count("moe_intermediate_size", 1407)
    grouped = method == "group_limited_greedy"
    mixture = Mixture(
        layers=_mixed_layers(values, first=0),
        experts=values.count_of("n_routed_experts", "num_experts", default=64),
        chosen=values.count("num_experts_per_tok"),
        width=width,
        groups=_groups(values, values.count("n_group"), values.count("topk_group"), best=1) if grouped else None,
        normalized=False,
        scale=values.number("routed_scaling_factor", 1.0),
        exact=True,
        shared="shared_experts",
        shared_width=values.count("n_shared_experts", 2) * width,
    )
    return {**_attention(values), "mixture": mixture}


LATENT: Mapping[str, Any] = {
    "head_dim": 64,
    "head_dim_name": "qk_rope_head_dim",
    "qkv_bias": Bias.IF_SAID,
    "output_bias": Bias.IF_SAID,
    "layer_types": windowless,
    "rope_interleaved": True,
}
DEEPSEEK_V2 = Family(**LATENT, unsaid={"max_position_embeddings": 2048}, mlp_bias=Bias.IF_SAID, more=_v2)
DEEPSEEK_V3 = Family(
    **LATENT, unsaid={"max_position_embeddings": 4096}, quantized=("fp8", "compressed-tensors"), more=_v3
)
DEEPSEEK_V32 = Family(
    **LATENT,
    unsaid={"max_position_embeddings": 163_840},
    kinds=(FULL, INDEXED),
    quantized=("fp8",),
    more=partial(indexed, groups=(8, 4)),
)
KIMI_K25 = Nested(
    language_model="deepseek_v3",
    namings=(
        Naming(body="model.language_model.", beside=("model.vision_tower.", "model.mm_projector.")),
        Naming(
            body="language_model.model.",
            unembedding="language_model.lm_head.",
            beside=("vision_tower.", "mm_projector."),
        ),
    ),
)
