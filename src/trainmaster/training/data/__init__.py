"""From `data_config` to rows, and from rows to the token sequences that a model is trained on.

`load` gives a script of your own the rows of its job; the rest is for the built-in trainers.
"""

from __future__ import annotations

from typing import Any

__all__ = ["build", "load"]

_HOME = {"build": "dataset", "load": "rows"}


def __getattr__(name: str) -> Any:
    """Import each name with its dependencies on first use."""
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
