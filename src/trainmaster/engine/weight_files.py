"""The files of weights in transformers checkpoints: reading and writing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainmaster.engine.adapters import Adapter
from trainmaster.engine.config import ModelConfig
from trainmaster.engine.published_weights import restored, tensors_of
from trainmaster.engine.targets import UNEMBEDDING, targets_within
from trainmaster.engine.types import EngineError
from trainmaster.engine.weight_layout import Layout, layout_of, naming_of

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""The size of a file, as transformers writes them."""
_CONFIG = "config.json"
_EMBEDDING = "model.embed_tokens.weight"
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5"}
"""Suffixes of files with weights; all other files describe the model and its tokenizer, and are copied."""
FORMAT = {"format": "pt"}
"""Readers expect this in the header of a file."""


def load_weights(
    model: nn.Module, config: ModelConfig, directory: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Load the weights of a checkpoint into a model on the meta device; tied parameters stay tied."""
    files = _files(directory)
    naming = naming_of(config, files)
    read = _Reader(files, device)
    every = {name for name, _ in _named_tensors(model)}
    layouts = {name: layout_of(config, naming, name, read) for name in every}
    wanted = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    known = {name for layout in layouts.values() for weight in layout.names for name in tensors_of(weight, files)}
    strange = (name for name in files if name not in known and not naming.is_beside(name))
    if unknown := sorted(name for name in strange if not name.endswith("rotary_emb.inv_freq")):
        raise EngineError(f"the checkpoint in {directory} has a weight that its architecture does not: {unknown[0]}")
    if missing := sorted(name for own in wanted for name in layouts[own].names if name not in read):
        raise EngineError(f"the checkpoint in {directory} has no weight {missing[0]}")
    loaded: dict[int, Tensor] = {}
    for own, expected in wanted.items():
        # What is not trained balances the experts of a router: small steps that 16 bits would lose.
        is_trained = isinstance(expected, nn.Parameter)
        own_dtype = dtype if is_trained else torch.promote_types(dtype, torch.float32)
        # A copy: the file may be mapped into memory, and what is done to it later would be done to the weights.
        weight = read.parameter(layouts[own], expected).to(device, own_dtype, copy=True).contiguous()
        loaded[id(expected)] = nn.Parameter(weight, requires_grad=False) if is_trained else weight
    for module in model.modules():
        for name, tensor in list(_named_tensors(module, recurse=False)):
            setattr(module, name, loaded[id(tensor)])


def _named_tensors(module: nn.Module, *, recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
    """What checkpoints have: parameters, tied ones by each of their names, and buffers."""
    yield from module.named_parameters(recurse=recurse, remove_duplicate=False)
    yield from module.named_buffers(recurse=recurse)


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


class _Reader:
    """Reads weights by name, those of fewer bits as 16; files stay open, as a layer's weights may be in several."""

    def __init__(self, files: Mapping[str, Path], device: torch.device) -> None:
        self._files = files
        self._device = str(device)
        self._opened: dict[Path, Any] = {}

    def __contains__(self, weight: str) -> bool:
        return tensors_of(weight, self._files)[0] in self._files

    def shape(self, name: str) -> Sequence[int]:
        shape: Sequence[int] = self._of(name, lambda opened: opened.get_slice(name).get_shape())
        return shape

    def weight(self, weight: str) -> Tensor:
        names = tensors_of(weight, self._files)
        return restored(weight, self._files, [self.tensor(name) for name in names])

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._of(name, lambda opened: opened.get_tensor(name))
        return tensor

    def _of(self, name: str, get: Callable[[Any], Any]) -> Any:
        path = self._files[name]
        try:
            if path not in self._opened:
                self._opened[path] = safe_open(path, framework="pt", device=self._device)
            return get(self._opened[path])
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{path} cannot be read: {error}") from None

    def parameter(self, layout: Layout, expected: Tensor) -> Tensor:
        """A parameter of an expected shape."""
        parts = [self.weight(name) for name in layout.names]
        for name, part, own in zip(layout.names, parts, layout.parted(expected), strict=True):
            path = self._files[tensors_of(name, self._files)[0]]
            if part.shape != own.shape:
                raise EngineError(f"{path}: {name} is {list(part.shape)}, and config.json says {list(own.shape)}")
            if not part.is_floating_point() or part.element_size() < 2:
                raise EngineError(f"{path}: {name} is {part.dtype}; weights of 16 bits or more are supported")
        return layout.joined(parts)


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
    described = json.loads((base_model / _CONFIG).read_text(encoding="utf-8"))
    # Weights are written as they are trained.
    changed = _plain(described)
    if _parts_unembedding(adapter):
        changed = _untied(changed)
    if changed != described:
        write_json(directory / _CONFIG, changed)
    _write_weights(_merged(transformer, adapter, base_model, config, trained=trained), directory)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _plain(value) if name == "text_config" and isinstance(value, dict) else value
        for name, value in config.items()
        if name != "quantization_config"
    }


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
    read = _Reader(files, torch.device("cpu"))
    for own, parameter in _named_tensors(transformer):
        tied = own.removesuffix(".weight") == UNEMBEDDING and config.tied
        if tied and not _parts_unembedding(adapter):
            continue
        layout = layout_of(config, naming, _EMBEDDING if tied else own, read)
        names = (naming.theirs(own),) if tied else layout.names
        original = read.parameter(layout, parameter)
        delta = None if adapter is None else _delta(adapter, own)
        weight = parameter.detach() if trained else original
        if delta is not None:
            weight = weight.to(delta.device, torch.float32) + delta
        for name, part in zip(names, layout.parted(weight), strict=True):
            yield name, part.to("cpu", original.dtype).contiguous()
    yield from ((name, read.tensor(name)) for name in files if naming.is_beside(name))


def _delta(adapter: Adapter, parameter: str) -> Tensor | None:
    """What the adapter adds to a parameter."""
    deltas = [adapter.delta(target) for target in targets_within(parameter) if target in adapter.factors]
    if not deltas:
        return None
    if adapter.config.mixture is None or not adapter.config.mixture.interleaved or deltas[0].dim() == 2:
        return torch.cat(deltas, dim=-2)
    # Rows of all by turns; experts have them as columns.
    return torch.stack(deltas, dim=-2).flatten(1, 2).transpose(1, 2)


def _write_weights(weights: Iterator[tuple[str, Tensor]], directory: Path) -> None:
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = 0

    def draft(number: int) -> Path:
        """The name of a file while the number of files is unknown."""
        return directory / f"model-{number:05d}.safetensors"

    def write() -> None:
        save_file(shard, draft(len(shards)), metadata=FORMAT)
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
    write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
