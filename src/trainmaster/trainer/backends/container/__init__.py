"""The configuration of the backend."""

from __future__ import annotations

from trainmaster.trainer.server_choice import ContainerBackendConfig, TrainingRuntimeSource

__all__ = ["ContainerBackendConfig", "TrainingRuntimeSource"]
