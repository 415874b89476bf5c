"""Fine-tuning and pre-training, full or LoRA: by the engine's model under a loop of our own, or by TRL."""

from __future__ import annotations

from pathlib import Path

from trainmaster.server.core.training.types import FrameworkType
from trainmaster.training import trl_trainer
from trainmaster.training.document import Document, DocumentError, Prepared
from trainmaster.training.loop.build import build as build_engine_trainer
from trainmaster.training.loop.engine_model import LackingError
from trainmaster.training.trainer import JobTrainer


def build(document: Document, prepared: Prepared, *, scratch: Path, world_size: int) -> JobTrainer:
    """The trainer of one rank, ready to train. Raises DocumentError where it cannot be set up as the job asks."""
    if document.training.framework.type is not FrameworkType.ENGINE:
        return trl_trainer.build(document, prepared, scratch=scratch, world_size=world_size)
    try:
        return build_engine_trainer(document, prepared)
    except LackingError as error:
        raise DocumentError(f"framework.type: {error}; use {FrameworkType.HF_TRAINER}") from error
