"""Training on preferences: DPO and its relatives, by the engine's model under the loop of our own."""

from __future__ import annotations

from pathlib import Path

from trainmaster.jobs import report
from trainmaster.server.core.training.preferences import LOSSES, PreferenceLoss
from trainmaster.training.document import Document, DocumentError, Prepared
from trainmaster.training.loop.build import build as build_engine_trainer
from trainmaster.training.loop.engine_model import LackingError
from trainmaster.training.loop.objectives import Judgements, Objective, Preferences
from trainmaster.training.loop.preference_losses import AnswerLoss, PairLoss
from trainmaster.training.sft import require_options
from trainmaster.training.steps import say
from trainmaster.training.trainer import JobTrainer


def build(document: Document, prepared: Prepared, *, scratch: Path, world_size: int) -> JobTrainer:  # noqa: ARG001
    """The trainer of one rank, ready to train. Raises DocumentError where it cannot be set up as the job asks."""
    try:
        require_options(document)
        trainer = build_engine_trainer(document, prepared, _objective(document))
    except LackingError as error:
        message = f"{document.training.training_type} is trained by the engine alone: {error}"
        raise DocumentError(f"training_config: {message}") from error
    if report.rank() == 0:
        say("the engine trains" + (f", sharded over {world_size} ranks" if document.sharded else ""))
    return trainer


def _objective(document: Document) -> Objective:
    parameters = document.hyperparameters
    if LOSSES[PreferenceLoss(str(parameters["loss_type"]))].unpaired:
        return Judgements(AnswerLoss.of(parameters))
    return Preferences(PairLoss.of(parameters))
