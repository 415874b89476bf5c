"""Which library an array belongs to. A library that is not imported has no arrays in a tree."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from trainmaster.jobs.trees.structure import Described, TreeError

_MODULES: Mapping[str, str] = MappingProxyType({"torch": "torch_tensors", "jax": "jax_arrays", "numpy": "numpy_arrays"})
"""Library -> our module for it. The order matters: an array of JAX is asked for before one of NumPy."""


def describe(value: Any) -> Described | None:
    """What an array is; None for what is no array.

    Raises:
        TypeError: it is an array that cannot be saved.
    """
    for library in _MODULES:
        if library in sys.modules:
            found: Described | None = adapter(library).describe(value)
            if found is not None:
                return found
    return None


def adapter(kind: str) -> ModuleType:
    """Our module for arrays of a kind.

    Raises:
        TreeError: there is no such kind, or its library is not installed.
    """
    library = kind.partition("-")[0]
    if library not in _MODULES:
        raise TreeError(f"the checkpoint holds arrays of {kind!r}, which this version does not know")
    try:
        return importlib.import_module(f"trainmaster.jobs.trees.{_MODULES[library]}")
    except ImportError as error:
        raise TreeError(f"the checkpoint holds arrays of {library}, which cannot be imported: {error}") from error
