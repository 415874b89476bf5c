"""The client, where programs written for Kubeflow import it from."""

from __future__ import annotations

from trainmaster.trainer.client import TrainerClient

__all__ = ["TrainerClient"]
