"""Trainer jobs by the names of Fireworks' training SDK: its classes, methods and defaults, on a Trainmaster server."""

from __future__ import annotations

from trainmaster.client.fireworks.platform import (
    FireworksClient,
    ResumeRefusedError,
    TrainerStoppedError,
    TrainerTimeoutError,
    TrainingAPIError,
)
from trainmaster.client.fireworks.records import (
    CreatedTrainerJob,
    TrainerJobConfig,
    TrainerServiceEndpoint,
    TrainingShapeProfile,
)
from trainmaster.client.fireworks.trainer_jobs import TrainerJobManager

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
