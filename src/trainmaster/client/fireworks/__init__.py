"""Trainer jobs by the names of Fireworks' training SDK: its classes, methods and defaults, on a Trainmaster server."""

from __future__ import annotations

from trainmaster.client.fireworks.platform import (
    FireworksClient,
    ResumeRefusedError,
    TrainerStoppedError,
    TrainerTimeoutError,
    TrainingAPIError,
    TrainingShapeProfile,
)
from trainmaster.client.fireworks.trainer_jobs import (
    CreatedTrainerJob,
    TrainerJobConfig,
    TrainerJobManager,
    TrainerServiceEndpoint,
)

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
