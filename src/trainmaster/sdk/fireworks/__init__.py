"""Trainer jobs by the names of Fireworks' training SDK: its classes, methods and defaults, on a Trainmaster server."""

from __future__ import annotations

from trainmaster.sdk.fireworks.config import TrainerJobConfig
from trainmaster.sdk.fireworks.errors import (
    ResumeRefusedError,
    TrainerStoppedError,
    TrainerTimeoutError,
    TrainingAPIError,
)
from trainmaster.sdk.fireworks.platform import FireworksClient
from trainmaster.sdk.fireworks.records import CreatedTrainerJob, TrainerServiceEndpoint, TrainingShapeProfile
from trainmaster.sdk.fireworks.trainer_jobs import TrainerJobManager

__all__ = [
    "CreatedTrainerJob",
    "FireworksClient",
    "ResumeRefusedError",
    "TrainerJobConfig",
    "TrainerJobManager",
    "TrainerServiceEndpoint",
    "TrainerStoppedError",
    "TrainerTimeoutError",
    "TrainingAPIError",
    "TrainingShapeProfile",
]
