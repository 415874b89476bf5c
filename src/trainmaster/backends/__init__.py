"""Backends: verbs over an engine. They know no database and decide nothing about jobs.

Registered by name and imported on first use, so that the server starts without any engine's client.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping

BACKENDS: Mapping[str, str] = {
    "local": "trainmaster.backends.local:LocalBackend",
    "scripted": "trainmaster.backends.scripted:ScriptedBackend",
}
"""Name -> where its class is."""


def backend_class(name: str) -> type:
    """The class of a backend.

    Raises:
        KeyError: there is no such backend.
    """
    module, _, attribute = BACKENDS[name].partition(":")
    found: type = getattr(importlib.import_module(module), attribute)
    return found
