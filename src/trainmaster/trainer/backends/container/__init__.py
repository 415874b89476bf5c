"""The configuration of the backend."""

from __future__ import annotations

from trainmaster.trainer.configs import ContainerBackendConfig, TrainingRuntimeSource

__all__ = ["ContainerBackendConfig", "TrainingRuntimeSource"]
