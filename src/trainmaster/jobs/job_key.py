"""The JAX key of a job class, as a file of its checkpoints. JAX is imported on use."""

from __future__ import annotations

import json
import sys
from typing import Any

FILE = "key.json"


def first() -> Any:
    """The key that a new job begins with."""
    import jax

    return jax.random.PRNGKey(0)


def files(key: Any) -> dict[str, str]:
    """The file that keeps a key; none where there is no key, or where the class means something else by that name."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(key, jax.Array) or not key.is_fully_addressable:
        return {}
    typed = bool(jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key))
    words = jax.random.key_data(key) if typed else key
    if words.dtype != "uint32":
        return {}
    kind = str(jax.random.key_impl(key)) if typed else None
    return {FILE: json.dumps({"words": words.tolist(), "kind": kind})}


def from_json(data: bytes) -> Any:
    """The key of a file."""
    import jax
    import jax.numpy

    document = json.loads(data)
    words = jax.numpy.asarray(document["words"], dtype="uint32")
    return words if document["kind"] is None else jax.random.wrap_key_data(words, impl=document["kind"])
