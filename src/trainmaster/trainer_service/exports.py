"""Weights that were exported, read back: a PEFT adapter, or a transformers checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from trainmaster.engine.config import ModelConfig
from trainmaster.engine.engine import Engine
from trainmaster.engine.export import read_adapter
from trainmaster.engine.model import Transformer
from trainmaster.engine.trained_model import Snapshot, weights_state
from trainmaster.engine.types import Trained


def is_adapter(directory: Path) -> bool:
    """Whether a directory has an adapter, and no whole model."""
    return (directory / "adapter_config.json").is_file()


def snapshot(engine: Engine, directory: Path) -> Snapshot:
    """What is in a directory, to be sampled from.

    Raises:
        EngineError: it is of another base model, or cannot be read.
    """
    if is_adapter(directory):
        adapter = read_adapter(engine.config, directory)
        return engine.snapshot_from(weights_state(Trained.ADAPTER, adapter.options, dict(adapter.named_parameters())))
    like = engine.base.unembedding.weight
    return Snapshot(transformer=_transformer(directory, like.device, like.dtype))


def load(engine: Engine, model_id: str, directory: Path) -> None:
    """Let a model begin with what is in a directory.

    Raises:
        EngineError: it is not of such a model, or cannot be read.
    """
    if is_adapter(directory):
        engine.load_adapter(model_id, directory)
    else:
        whole = _transformer(directory, torch.device("cpu"), engine.base.unembedding.weight.dtype)
        state = weights_state(Trained.ALL, None, dict(whole.named_parameters()))
        engine.load_state(model_id, state, optimizer=False)


def _transformer(directory: Path, device: torch.device, dtype: torch.dtype) -> Transformer:
    # An adapter of the unembedding parts it from the embedding: the configuration may be another than the base's.
    return Transformer(ModelConfig.read(directory)).load(directory, device, dtype)
