"""The weights of a transformers checkpoint: their names, and the safetensors files that hold them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from trainmaster.engine.config import ModelConfig
from trainmaster.engine.types import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Prefixes of weight names in checkpoints and in PEFT, where a model may also have a vision tower.

    In this package names start with `model.` and `lm_head.`, as in a language model alone.
    """

    body: str = "model."
    unembedding: str = "lm_head."
    beside: tuple[str, ...] = ()
    """Prefixes of weights outside the language model."""

    def theirs(self, own: str) -> str:
        return _renamed(own, {"model.": self.body, "lm_head.": self.unembedding})

    def own(self, theirs: str) -> str:
        return _renamed(theirs, {self.body: "model.", self.unembedding: "lm_head."})

    def is_beside(self, theirs: str) -> bool:
        return theirs.startswith(self.beside)


_ALONE = Naming()
_MODULES = Naming(body="model.language_model.", beside=("model.vision_tower.", "model.multi_modal_projector."))
_FILES = Naming(
    body="language_model.model.",
    unembedding="language_model.lm_head.",
    beside=("vision_tower.", "multi_modal_projector."),
)


def module_naming(config: ModelConfig) -> Naming:
    """The names of transformers' modules, which PEFT uses, too."""
    return _MODULES if config.nested else _ALONE


def naming_of(config: ModelConfig, names: Iterable[str]) -> Naming:
    """How some weights are named: transformers saves published names, or those of its modules."""
    if config.nested and any(name.startswith((_FILES.body, _FILES.unembedding)) for name in names):
        return _FILES
    return module_naming(config)


def _renamed(name: str, beginnings: dict[str, str]) -> str:
    for old, new in beginnings.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def check_shapes(problem: str, own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Refuse weights whose names or shapes are not those of our own."""
    if other := sorted(own.keys() ^ given.keys()):
        raise EngineError(f"{problem}: {other[0]} is on one side only")
    for name, tensor in own.items():
        if given[name].shape != tensor.shape:
            raise EngineError(f"{problem}: {name} is {list(given[name].shape)}, not {list(tensor.shape)}")


_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


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


class StoredWeights:
    """The weights of a checkpoint as its files have them, read one at a time."""

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        self._files = _files(directory)
        self._naming = naming_of(config, self._files)

    def name(self, own: str) -> str:
        """The name of a weight in the files."""
        return self._naming.theirs(own)

    def read(self, own: str) -> Tensor:
        return self._read(self.name(own))

    def beside(self) -> Iterator[tuple[str, Tensor]]:
        """The weights outside the language model, by the files' names."""
        for name in self._files:
            if self._naming.is_beside(name):
                yield name, self._read(name)

    def _read(self, name: str) -> Tensor:
        ((_, tensor),) = _read(self._files[name], [name], torch.device("cpu"))
        return tensor


def _files(directory: Path) -> dict[str, Path]:
    """The file of each weight."""
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
