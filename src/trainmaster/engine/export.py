"""Exports weights as PEFT adapters and transformers checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainmaster.engine.adapters import UNEMBEDDING, Adapter
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.trained_model import WeightsSnapshot
from trainmaster.engine.types import EngineError
from trainmaster.engine.weight_files import StoredWeights

SHARD_BYTES = 5 * 10**9
"""The size of a file, as transformers writes them."""
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "config.json"
_EMBEDDING = "model.embed_tokens.weight"
_INDEX = "model.safetensors.index.json"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5"}
"""Suffixes of files with weights; all other files describe the model and its tokenizer, and are copied."""
_FORMAT = {"format": "pt"}
"""Readers expect this in the header of a file."""


def export_adapter(snapshot: WeightsSnapshot, base_model: Path, directory: Path, *, tinker_names: bool = False) -> None:
    """Write a PEFT adapter for a base model; for `tinker_names` see `Adapter.peft_tensors`."""
    if snapshot.adapter is None:
        raise EngineError("these weights have no adapter: export them merged, as a model")
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / _ADAPTER_CONFIG, snapshot.adapter.peft_config(str(base_model)))
    save_file(snapshot.adapter.peft_tensors(tinker_names=tinker_names), directory / _ADAPTER_WEIGHTS, metadata=_FORMAT)


def read_adapter(config: ModelConfig, directory: Path) -> Adapter:
    for name in (_ADAPTER_CONFIG, _ADAPTER_WEIGHTS):
        if not (directory / name).is_file():
            raise EngineError(f"{directory} is not a PEFT adapter: it has no {name}")
    try:
        described = json.loads((directory / _ADAPTER_CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(directory / _ADAPTER_WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineError(f"the PEFT adapter in {directory} cannot be read: {error}") from None
    return Adapter.from_peft(config, described, tensors)


def export_model(snapshot: WeightsSnapshot, base_model: Path, directory: Path, *, trained: bool) -> None:
    """Write a transformers checkpoint with the adapter merged into the weights.

    Each weight has its type of the base model's checkpoint; configuration and tokenizer are the base model's. Weights
    that are not `trained` are read from its files, since the engine may have rounded its own.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in sorted(base_model.iterdir()):
        if path.is_file() and path.suffix not in _WEIGHTS and path.name != _INDEX:
            shutil.copyfile(path, directory / path.name)
    # An adapter of the unembedding alone parts it from the embedding.
    untied = snapshot.adapter is not None and UNEMBEDDING in snapshot.adapter.factors
    if untied:
        config = json.loads((base_model / _CONFIG).read_text(encoding="utf-8"))
        _write_json(directory / _CONFIG, _untied(config))
    stored = StoredWeights(base_model, snapshot.transformer.config)
    _write_weights(_merged(snapshot, stored, trained=trained, untied=untied), directory)


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Versions of transformers differ in which part of a nested configuration they read."""
    inner = config.get("text_config")
    parts = {"text_config": _untied(inner)} if isinstance(inner, dict) else {}
    return {**config, **parts, "tie_word_embeddings": False}


def _merged(
    snapshot: WeightsSnapshot, stored: StoredWeights, *, trained: bool, untied: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight by its name in a checkpoint, one at a time: a second copy of the model may not fit."""
    adapter, tied = snapshot.adapter, snapshot.transformer.config.tied
    for name, parameter in snapshot.transformer.named_parameters(remove_duplicate=False):
        target = name.removesuffix(".weight")
        if target == UNEMBEDDING and tied and not untied:
            continue
        original = stored.read(_EMBEDDING if target == UNEMBEDDING and tied else name)
        weight = parameter.detach() if trained else original
        if adapter is not None and target in adapter.factors:
            delta = adapter.delta(target)
            weight = weight.to(delta.device, torch.float32) + delta
        yield stored.name(name), weight.to("cpu", original.dtype).contiguous()
    yield from stored.beside()


def _write_weights(weights: Iterator[tuple[str, Tensor]], directory: Path) -> None:
    """Write files of about SHARD_BYTES, with an index if there are several."""
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = 0
    for name, weight in weights:
        if shard and sum(each.nbytes for each in shard.values()) + weight.nbytes > SHARD_BYTES:
            shards.append(_write_shard(shard, directory, len(shards)))
            shard = {}
        shard[name] = weight
        total += weight.nbytes
    shards.append(_write_shard(shard, directory, len(shards)))
    if len(shards) == 1:
        _shard_path(directory, 0).rename(directory / "model.safetensors")
        return
    places = {}
    for number, names in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        _shard_path(directory, number).rename(directory / final)
        places.update(dict.fromkeys(names, final))
    _write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _write_shard(shard: Mapping[str, Tensor], directory: Path, number: int) -> list[str]:
    save_file(dict(shard), _shard_path(directory, number), metadata=_FORMAT)
    return list(shard)


def _shard_path(directory: Path, number: int) -> Path:
    """The name of a file while the number of files is unknown."""
    return directory / f"model-{number:05d}.safetensors"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
