"""The files of weights: transformers checkpoints and PEFT adapters, how they name weights, reading and writing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainmaster.engine.adapters import Adapter
from trainmaster.engine.architectures.naming import ALONE, Naming, renamed
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.targets import ATTENTION, MLP, UNEMBEDDING, part_of
from trainmaster.engine.types import EngineError, LoraOptions


def module_naming(config: ModelConfig) -> Naming:
    """The names of transformers' modules, which PEFT uses, too."""
    return config.nested.namings[0] if config.nested else ALONE


def naming_of(config: ModelConfig, names: Iterable[str]) -> Naming:
    """How some weights are named: transformers saves published names, or those of its modules."""
    modules, *others = config.nested.namings if config.nested else (ALONE,)
    known = list(names)
    for other in others:
        if any(name.startswith((other.body, other.unembedding)) for name in known):
            return other
    return modules


_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""The size of a file, as transformers writes them."""
_CONFIG = "config.json"
_EMBEDDING = "model.embed_tokens.weight"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5"}
"""Suffixes of files with weights; all other files describe the model and its tokenizer, and are copied."""
_FORMAT = {"format": "pt"}
"""Readers expect this in the header of a file."""


def load_weights(
    model: nn.Module, config: ModelConfig, directory: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Load the weights of a checkpoint into a model on the meta device; tied parameters stay tied."""
    files = _files(directory)
    naming = naming_of(config, files)
    wanted = {naming.theirs(name): parameter for name, parameter in model.named_parameters()}
    known = {naming.theirs(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    strange = (name for name in files if name not in known and not naming.is_beside(name))
    if unknown := sorted(name for name in strange if not name.endswith("rotary_emb.inv_freq")):
        raise EngineError(f"the checkpoint in {directory} has a weight that its architecture does not: {unknown[0]}")
    if missing := sorted(wanted.keys() - files.keys()):
        raise EngineError(f"the checkpoint in {directory} has no weight {missing[0]}")
    by_file: dict[Path, list[str]] = {}
    for name in wanted:
        by_file.setdefault(files[name], []).append(name)
    loaded: dict[int, nn.Parameter] = {}
    for path, names in by_file.items():
        for name, tensor in _read(path, names, device):
            if tensor.shape != wanted[name].shape:
                shapes = f"{list(tensor.shape)}, and config.json says {list(wanted[name].shape)}"
                raise EngineError(f"{path}: {name} is {shapes}")
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise EngineError(f"{path}: {name} is {tensor.dtype}; weights of 16 bits or more are supported")
            # A copy: the file may be mapped into memory, and what is done to it later would be done to the weights.
            loaded[id(wanted[name])] = nn.Parameter(tensor.to(device, dtype, copy=True), requires_grad=False)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, loaded[id(parameter)])


def _files(directory: Path) -> dict[str, Path]:
    index = directory / _INDEX
    if index.is_file():
        try:
            listed: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: directory / Path(str(file)).name for name, file in listed.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(f"{index} cannot be read: {error!r}") from None
    single = directory / _SINGLE
    if not single.is_file():
        raise EngineError(f"{directory} has no weights: neither {_SINGLE} nor {_INDEX}")
    try:
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{single} cannot be read: {error}") from None


def _read(path: Path, names: list[str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt", device=str(device)) as opened:
            for name in names:
                yield name, opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{path} cannot be read: {error}") from None


def export_model(
    transformer: nn.Module,
    config: ModelConfig,
    adapter: Adapter | None,
    base_model: Path,
    directory: Path,
    *,
    trained: bool,
) -> None:
    """Write a checkpoint with the base model's types, configuration and tokenizer, and with the adapter merged.

    Weights that are not `trained` are read from its files, since the engine may have rounded its own.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(base_model.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHTS and path.name != _INDEX:
            shutil.copyfile(path, directory / path.name)
    if _parts_unembedding(adapter):
        described = json.loads((base_model / _CONFIG).read_text(encoding="utf-8"))
        _write_json(directory / _CONFIG, _untied(described))
    _write_weights(_merged(transformer, adapter, base_model, config, trained=trained), directory)


def _parts_unembedding(adapter: Adapter | None) -> bool:
    """An adapter of the unembedding alone parts it from the embedding."""
    return adapter is not None and UNEMBEDDING in adapter.factors


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Versions of transformers differ in which part of a nested configuration they read."""
    inner = config.get("text_config")
    parts = {"text_config": _untied(inner)} if isinstance(inner, dict) else {}
    return {**config, **parts, "tie_word_embeddings": False}


def _merged(
    transformer: nn.Module, adapter: Adapter | None, base_model: Path, config: ModelConfig, *, trained: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight by its name in a checkpoint, one at a time: a second copy of the model may not fit."""
    files = _files(base_model)
    naming = naming_of(config, files)

    def stored(name: str) -> Tensor:
        ((_, tensor),) = _read(files[name], [name], torch.device("cpu"))
        return tensor

    for name, parameter in transformer.named_parameters(remove_duplicate=False):
        target = name.removesuffix(".weight")
        tied = target == UNEMBEDDING and config.tied
        if tied and not _parts_unembedding(adapter):
            continue
        original = stored(naming.theirs(_EMBEDDING if tied else name))
        weight = parameter.detach() if trained else original
        if adapter is not None and target in adapter.factors:
            delta = adapter.delta(target)
            weight = weight.to(delta.device, torch.float32) + delta
        yield naming.theirs(name), weight.to("cpu", original.dtype).contiguous()
    yield from ((name, stored(name)) for name in files if naming.is_beside(name))


def _write_weights(weights: Iterator[tuple[str, Tensor]], directory: Path) -> None:
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = 0

    def draft(number: int) -> Path:
        """The name of a file while the number of files is unknown."""
        return directory / f"model-{number:05d}.safetensors"

    def write() -> None:
        save_file(shard, draft(len(shards)), metadata=_FORMAT)
        shards.append(list(shard))

    for name, weight in weights:
        if shard and sum(each.nbytes for each in shard.values()) + weight.nbytes > SHARD_BYTES:
            write()
            shard = {}
        shard[name] = weight
        total += weight.nbytes
    write()
    if len(shards) == 1:
        draft(0).rename(directory / _SINGLE)
        return
    places = {}
    for number, names in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        draft(number).rename(directory / final)
        places.update(dict.fromkeys(names, final))
    _write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# PEFT adapters.

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
    naming = module_naming(adapter.config)
    others = [re.escape(name) for name in naming.beside]
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_model),
        "r": adapter.options.rank,
        "lora_alpha": adapter.options.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({target.rpartition(".")[2] for target in adapter.factors}),
        # Layers of a vision tower have the same names.
        **({"exclude_modules": rf"({'|'.join(others)}).*"} if others else {}),
        "inference_mode": True,
        **_PEFT_OPTIONS,
    }
    unembedding = {f"{UNEMBEDDING}.": f"{_TINKER_UNEMBEDDING}."} if tinker_names and adapter.config.tied else {}
    tensors = {
        _PEFT_PREFIX + naming.theirs(renamed(name, unembedding)): each.detach().cpu().contiguous()
        for name, each in adapter.named_parameters()
    }
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / _ADAPTER_CONFIG, described)
    save_file(tensors, directory / _ADAPTER_WEIGHTS, metadata=_FORMAT)


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
