"""Kubeflow's Trainer SDK, by its own names, on a Trainmaster server.

`from trainmaster.trainer import TrainerClient, CustomTrainer` in place of `from kubeflow.trainer import ...`. Names are
imported on first use: `update_trainjob_status` is called in training code, which should not wait for an HTTP library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmaster.trainer.client import TrainerClient
    from trainmaster.trainer.constants import DATASET_PATH, MODEL_PATH
    from trainmaster.trainer.errors import NameRefusedError, NotFoundError
    from trainmaster.trainer.resources import get_tpu_num_nodes
    from trainmaster.trainer.server_choice import (
        ContainerBackendConfig,
        KubernetesBackendConfig,
        LocalProcessBackendConfig,
        ServerBackendConfig,
        TrainingRuntimeSource,
    )
    from trainmaster.trainer.status import update_trainjob_status
    from trainmaster.trainer.types import (
        BaseInitializer,
        BuiltinTrainer,
        Checkpoint,
        CustomTrainer,
        CustomTrainerContainer,
        DataCacheInitializer,
        DataFormat,
        DataType,
        Event,
        HuggingFaceDatasetInitializer,
        HuggingFaceModelInitializer,
        Initializer,
        LoraConfig,
        Loss,
        Progress,
        Runtime,
        RuntimeKind,
        RuntimeTrainer,
        S3DatasetInitializer,
        S3ModelInitializer,
        ScriptTrainer,
        Step,
        TorchTuneConfig,
        TorchTuneInstructDataset,
        TrainerType,
        TrainJob,
        TrainJobTemplate,
    )

__all__ = [
    "DATASET_PATH",
    "MODEL_PATH",
    "BaseInitializer",
    "BuiltinTrainer",
    "Checkpoint",
    "ContainerBackendConfig",
    "CustomTrainer",
    "CustomTrainerContainer",
    "DataCacheInitializer",
    "DataFormat",
    "DataType",
    "Event",
    "HuggingFaceDatasetInitializer",
    "HuggingFaceModelInitializer",
    "Initializer",
    "KubernetesBackendConfig",
    "LocalProcessBackendConfig",
    "LoraConfig",
    "Loss",
    "NameRefusedError",
    "NotFoundError",
    "Progress",
    "Runtime",
    "RuntimeKind",
    "RuntimeTrainer",
    "S3DatasetInitializer",
    "S3ModelInitializer",
    "ScriptTrainer",
    "ServerBackendConfig",
    "Step",
    "TorchTuneConfig",
    "TorchTuneInstructDataset",
    "TrainJob",
    "TrainJobTemplate",
    "TrainerClient",
    "TrainerType",
    "TrainingRuntimeSource",
    "get_tpu_num_nodes",
    "update_trainjob_status",
]

_ELSEWHERE = {
    "ContainerBackendConfig": "server_choice",
    "DATASET_PATH": "constants",
    "KubernetesBackendConfig": "server_choice",
    "LocalProcessBackendConfig": "server_choice",
    "MODEL_PATH": "constants",
    "NameRefusedError": "errors",
    "NotFoundError": "errors",
    "ServerBackendConfig": "server_choice",
    "TrainerClient": "client",
    "TrainingRuntimeSource": "server_choice",
    "get_tpu_num_nodes": "resources",
    "update_trainjob_status": "status",
}
"""Name -> its module, for those that do not lie in `types`."""


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module(f"{__name__}.{_ELSEWHERE.get(name, 'types')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
