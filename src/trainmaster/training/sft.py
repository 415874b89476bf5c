"""Fine-tuning and pre-training, full or LoRA: by the engine's model under a loop of our own, or by TRL."""

from __future__ import annotations

from pathlib import Path

from trainmaster.jobs import report
from trainmaster.server.core.training.engine_options import engine_lacks
from trainmaster.server.core.training.hyperparameters import FP8
from trainmaster.server.core.training.types import FrameworkType
from trainmaster.training import trl_trainer
from trainmaster.training.document import Document, DocumentError, Prepared
from trainmaster.training.loop.build import build as build_engine_trainer
from trainmaster.training.loop.engine_model import LackingError
from trainmaster.training.loop.objectives import NextTokens
from trainmaster.training.steps import note, say
from trainmaster.training.trainer import JobTrainer


def build(document: Document, prepared: Prepared, *, scratch: Path, world_size: int) -> JobTrainer:
    """The trainer of one rank, ready to train. Raises DocumentError where it cannot be set up as the job asks."""
    framework, first = document.training.framework.type, report.rank() == 0
    if framework in (FrameworkType.AUTO, FrameworkType.ENGINE, FrameworkType.FSDP):
        try:
            require_options(document)
            trainer = build_engine_trainer(document, prepared, NextTokens())
        except LackingError as error:
            if document.hyperparameters["mixed_precision"] == FP8:
                message = f"fp8 is computed by the engine alone: {error}; use bf16"
                raise DocumentError(f"hyperparameters.mixed_precision: {message}") from error
            if framework is FrameworkType.ENGINE:
                raise DocumentError(f"framework.type: {error}; use {FrameworkType.HF_TRAINER}") from error
            if first:
                note(f"TRL trains, and not the engine: {error}")
        else:
            if first:
                say("the engine trains" + (f", sharded over {world_size} ranks" if document.sharded else ""))
            return trainer
    return trl_trainer.build(document, prepared, scratch=scratch, world_size=world_size)


def require_options(document: Document) -> None:
    """Raises LackingError where the engine's loop lacks an option of the job."""
    training = document.training
    lacking = engine_lacks(
        hyperparameters=document.hyperparameters,
        config=training.framework.config,
        distributed=training.framework.distributed.config,
        sharded=document.sharded,
        padding=document.data.preprocess.padding,
        packing=document.packing,
        dtype=training.base_model.dtype,
        trust_remote_code=training.base_model.trust_remote_code,
    )
    for field, why in lacking:
        raise LackingError(f"{field} {why}")
