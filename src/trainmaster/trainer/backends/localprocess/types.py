"""The configuration of the backend."""

from __future__ import annotations

from trainmaster.trainer.server_choice import LocalProcessBackendConfig

__all__ = ["LocalProcessBackendConfig"]
