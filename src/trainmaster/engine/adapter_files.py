"""PEFT adapters in files: reading and writing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainmaster.engine.adapters import Adapter
from trainmaster.engine.architectures.naming import ALONE, renamed
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.targets import ATTENTION, MLP, UNEMBEDDING, part_of
from trainmaster.engine.types import EngineError, LoraOptions
from trainmaster.engine.weight_files import FORMAT, write_json
from trainmaster.engine.weight_layout import module_naming, naming_of

_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_TINKER_UNEMBEDDING = "model.unembed_tokens"
_PEFT_PREFIX = "base_model.model."
_PEFT_OPTIONS = {"bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False}
"""Options of a PEFT adapter that must have these values: others make it another function."""


def export_adapter(adapter: Adapter, base_model: Path, directory: Path, *, tinker_names: bool = False) -> None:
    """Write a PEFT adapter. `tinker_names` calls the unembedding's factors `model.unembed_tokens`, not `lm_head`.

    Tinker's tools want that, as the files of a tied model have no `lm_head`; PEFT then needs a `key_mapping`.
    """
    config = adapter.config
    naming = ALONE if tinker_names else module_naming(config)
    unembedding = {f"{UNEMBEDDING}.": f"{_TINKER_UNEMBEDDING}."} if tinker_names and config.tied else {}
    tensors = {
        _PEFT_PREFIX + naming.theirs(renamed(name, unembedding)): tensor.contiguous()
        for own, factor in adapter.named_parameters()
        for name, tensor in _of_experts(config, own, factor.detach().cpu(), tinker_names=tinker_names)
    }
    others = [re.escape(name) for name in naming.beside]
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_model),
        "r": adapter.options.rank,
        "lora_alpha": adapter.options.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({_module_of(config, target) for target in adapter.factors}),
        # Layers of a vision tower have the same names.
        **({"exclude_modules": rf"({'|'.join(others)}).*"} if others and not tinker_names else {}),
        "inference_mode": True,
        **_PEFT_OPTIONS,
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / _ADAPTER_CONFIG, described)
    save_file(tensors, directory / _ADAPTER_WEIGHTS, metadata=FORMAT)


def read_adapter(config: ModelConfig, directory: Path) -> Adapter:
    for name in (_ADAPTER_CONFIG, _ADAPTER_WEIGHTS):
        if not (directory / name).is_file():
            raise EngineError(f"{directory} is not a PEFT adapter: it has no {name}")
    try:
        described = json.loads((directory / _ADAPTER_CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(directory / _ADAPTER_WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineError(f"the PEFT adapter in {directory} cannot be read: {error}") from None
    plain = {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in tensors.items()}
    naming = naming_of(config, plain)
    given = _with_all_experts(
        config,
        {
            renamed(naming.own(name), {f"{_TINKER_UNEMBEDDING}.": f"{UNEMBEDDING}."}): tensor
            for name, tensor in plain.items()
        },
    )
    adapter = Adapter(config, _lora_options(described, given))
    for factor, other in (("lora_A", "lora_B"), ("lora_B", "lora_A")):
        if alone := [name for name in given if name.replace(factor, other) not in given]:
            raise EngineError(f"the PEFT adapter cannot be used: it has {alone[0]}, and no {other} for it")
    # What it does not adapt, it adapts by nothing: B begins as zero.
    adapter.load({**dict(adapter.named_parameters()), **given})
    return adapter


_EXPERTS = ".mlp.experts."
_PRODUCTS = ("gate_proj", "up_proj", "down_proj")
_TINKER_PRODUCTS = ("w1", "w3", "w2")


def _module_of(config: ModelConfig, target: str) -> str:
    product = target.rpartition(".")[2]
    if config.mixture is None or _EXPERTS not in target:
        return product
    return config.mixture.names[_PRODUCTS.index(product)]


def _of_experts(config: ModelConfig, name: str, factor: Tensor, *, tinker_names: bool) -> Iterator[tuple[str, Tensor]]:
    """PEFT has factors for each expert, Tinker has them for all experts of a layer; others are as they are."""
    layer, is_of_experts, rest = name.partition(_EXPERTS)
    if not is_of_experts or config.mixture is None:
        yield name, factor
        return
    product, _, kind = rest.partition(".")
    place = _PRODUCTS.index(product)
    if tinker_names:
        yield f"{layer}{_EXPERTS}{_TINKER_PRODUCTS[place]}.{kind}", factor
        return
    mixture = config.mixture
    for expert, own in enumerate(factor.unbind(0)):
        yield f"{layer}.{mixture.module}.experts.{expert}.{mixture.names[place]}.{kind}", own


_OF_EXPERT = re.compile(
    r"(?P<layer>.*)\.(?P<module>\w+)\.experts\.((?P<expert>\d+)\.)?(?P<product>\w+)\.(?P<kind>lora_.*)"
)


def _with_all_experts(config: ModelConfig, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same by this package's names; factors that Tinker shares among experts are repeated."""
    if config.mixture is None:
        return dict(given)
    known = dict(zip((*_TINKER_PRODUCTS, *_PRODUCTS, *config.mixture.names), _PRODUCTS * 3, strict=True))
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in given.items():
        match = _OF_EXPERT.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        product = known.get(match["product"], match["product"])
        own = f"{match['layer']}{_EXPERTS}{product}.{match['kind']}"
        if match["expert"] is None:
            found[own] = tensor.expand(config.mixture.experts, -1, -1) if len(tensor) == 1 else tensor
        else:
            experts.setdefault(own, {})[int(match["expert"])] = tensor
    for own, tensors in experts.items():
        if len(tensors) != config.mixture.experts or len({each.shape for each in tensors.values()}) > 1:
            raise EngineError(f"the PEFT adapter cannot be used: {own} is not of one shape for all experts")
        found[own] = torch.stack([tensors[expert] for expert in sorted(tensors)])
    return found


def _lora_options(described: Mapping[str, Any], names: Iterable[str]) -> LoraOptions:
    for name, value in _PEFT_OPTIONS.items():
        if described.get(name, value) != value:
            raise EngineError(f"the PEFT adapter cannot be used: its {name} is {described[name]!r}, not {value!r}")
    for name in ("rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices"):
        if described.get(name):
            raise EngineError(f"the PEFT adapter cannot be used: its {name} is not supported")
    parts = {part_of(name.rpartition(".lora_")[0]) for name in names}
    try:
        rank, alpha = int(described["r"]), float(described["lora_alpha"])
    except (KeyError, TypeError, ValueError):
        raise EngineError("the PEFT adapter cannot be used: it does not say its r and lora_alpha") from None
    return LoraOptions(
        rank=rank,
        alpha=alpha,
        train_attn=ATTENTION in parts,
        train_mlp=MLP in parts,
        train_unembed=UNEMBEDDING in parts,
    )
