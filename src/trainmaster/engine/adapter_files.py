"""PEFT adapters in files: reading and writing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainmaster.engine.adapters import Adapter
from trainmaster.engine.architectures.naming import ALONE, renamed
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.expert_factors import expert_options, own_factors, peft_factors, tinker_factors
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
    own = {name: factor.detach().cpu() for name, factor in adapter.named_parameters()}
    written = own
    if config.mixture is not None:
        written = tinker_factors(own) if tinker_names else peft_factors(config.mixture, own)
    tensors = {
        _PEFT_PREFIX + naming.theirs(renamed(name, unembedding)): tensor.contiguous()
        for name, tensor in written.items()
    }
    others = [re.escape(name) for name in naming.beside] if config.nested and not tinker_names else []
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_model),
        "r": adapter.options.rank,
        "lora_alpha": adapter.options.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({target.rpartition(".")[2] for target in adapter.factors}),
        **({} if config.mixture is None or tinker_names else expert_options(config.mixture, adapter)),
        # Layers of a vision tower have the same names.
        **({"exclude_modules": rf"({'|'.join(others)}).*"} if others else {}),
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
    given = {
        renamed(naming.own(name), {f"{_TINKER_UNEMBEDDING}.": f"{UNEMBEDDING}."}): tensor
        for name, tensor in plain.items()
    }
    if config.mixture is not None:
        given = own_factors(config.mixture, given)
        described = {**described, "rank_pattern": {}, "alpha_pattern": {}}
    adapter = Adapter(config, _lora_options(described, given))
    for factor, other in (("lora_A", "lora_B"), ("lora_B", "lora_A")):
        if alone := [name for name in given if name.replace(factor, other) not in given]:
            raise EngineError(f"the PEFT adapter cannot be used: it has {alone[0]}, and no {other} for it")
    # What it does not adapt, it adapts by nothing: B begins as zero.
    adapter.load({**dict(adapter.named_parameters()), **given})
    return adapter


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
