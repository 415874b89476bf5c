"""From `data_config` to rows and token sequences. `load` is for your own scripts, the rest for built-in trainers."""

from __future__ import annotations

from typing import Any

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    """Import `load` with its dependencies on first use."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trainmaster.training.data.rows import load

    return load
