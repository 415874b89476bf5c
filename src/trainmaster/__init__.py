"""Trainmaster runs model training on the machines that its user owns, from a laptop to a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmaster.client.fireworks import (
        CreatedTrainerJob,
        FireworksClient,
        TrainerJobConfig,
        TrainerJobManager,
        TrainerServiceEndpoint,
        TrainingShapeProfile,
    )
    from trainmaster.trainer import (
        BuiltinTrainer,
        ContainerBackendConfig,
        CustomTrainer,
        CustomTrainerContainer,
        KubernetesBackendConfig,
        LocalProcessBackendConfig,
        ScriptTrainer,
        ServerBackendConfig,
        TrainerClient,
        update_trainjob_status,
    )

__version__ = "0.2.0"

__all__ = [
    "BuiltinTrainer",
    "ContainerBackendConfig",
    "CreatedTrainerJob",
    "CustomTrainer",
    "CustomTrainerContainer",
    "FireworksClient",
    "KubernetesBackendConfig",
    "LocalProcessBackendConfig",
    "ScriptTrainer",
    "ServerBackendConfig",
    "TrainerClient",
    "TrainerJobConfig",
    "TrainerJobManager",
    "TrainerServiceEndpoint",
    "TrainingShapeProfile",
    "update_trainjob_status",
]


def __getattr__(name: str) -> object:
    # Workers and training code import this package too, and should not wait for an HTTP library.
    if name in __all__:
        from trainmaster import trainer

        if hasattr(trainer, name):
            return getattr(trainer, name)
        from trainmaster.client import fireworks

        return getattr(fireworks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
