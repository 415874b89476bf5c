"""What every built-in trainer can do, whichever loop it runs."""

from __future__ import annotations

from typing import Protocol

from torch import nn
from transformers import PreTrainedTokenizerBase

from trainmaster.training.progress_report import Reporting
from trainmaster.training.session import Session


class JobTrainer(Protocol):
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    def bare_model(self) -> nn.Module:
        """The trained model, as transformers and PEFT know it; each rank has its own shard of a sharded one."""

    def report_to(self, reporting: Reporting) -> None:
        """Report the course of the training; called on the first rank, before `run`."""

    def run(self, session: Session) -> None:
        """Train to the end and load the best model. Raises Stopped when the job was asked to stop and has saved."""
