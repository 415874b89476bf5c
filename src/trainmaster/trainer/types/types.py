"""All types in one place, as programs written for Kubeflow import them."""

from __future__ import annotations

from trainmaster.trainer.constants import TORCH_TUNE
from trainmaster.trainer.types.initializers import (
    BaseInitializer,
    DataCacheInitializer,
    HuggingFaceDatasetInitializer,
    HuggingFaceModelInitializer,
    Initializer,
    S3DatasetInitializer,
    S3ModelInitializer,
)
from trainmaster.trainer.types.results import (
    Checkpoint,
    Event,
    Progress,
    Runtime,
    RuntimeKind,
    RuntimeTrainer,
    Step,
    TrainerType,
    TrainJob,
)
from trainmaster.trainer.types.tables import Listing
from trainmaster.trainer.types.trainers import (
    BuiltinTrainer,
    CustomTrainer,
    CustomTrainerContainer,
    DataFormat,
    DataType,
    LoraConfig,
    Loss,
    ScriptTrainer,
    TorchTuneConfig,
    TorchTuneInstructDataset,
    TrainJobTemplate,
)

__all__ = [
    "TORCH_TUNE",
    "BaseInitializer",
    "BuiltinTrainer",
    "Checkpoint",
    "CustomTrainer",
    "CustomTrainerContainer",
    "DataCacheInitializer",
    "DataFormat",
    "DataType",
    "Event",
    "HuggingFaceDatasetInitializer",
    "HuggingFaceModelInitializer",
    "Initializer",
    "Listing",
    "LoraConfig",
    "Loss",
    "Progress",
    "Runtime",
    "RuntimeKind",
    "RuntimeTrainer",
    "S3DatasetInitializer",
    "S3ModelInitializer",
    "ScriptTrainer",
    "Step",
    "TorchTuneConfig",
    "TorchTuneInstructDataset",
    "TrainJob",
    "TrainJobTemplate",
    "TrainerType",
]
