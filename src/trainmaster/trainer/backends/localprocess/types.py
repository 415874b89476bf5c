"""The configuration of the backend."""

from __future__ import annotations

from trainmaster.trainer.configs import LocalProcessBackendConfig

__all__ = ["LocalProcessBackendConfig"]
