"""The state of this process's global random-number generators: Python's, NumPy's and PyTorch's.

A library that is not imported has drawn nothing and is left alone. JAX has no global generator: its keys are arrays of
the tree, and the key of a job class is a file of its checkpoints.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster.jobs.trees.reader import read_small
from trainmaster.jobs.trees.writer import write_small


def capture() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    tree: dict[str, Any] = {"python": {"version": version, "words": list(words), "gauss": gauss}}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, key, position, has_gauss, cached = numpy.random.get_state()
        tree["numpy"] = {
            "name": name,
            "key": numpy.array(key),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        }
    if (torch := sys.modules.get("torch")) is not None:
        tree["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            tree["cuda"] = torch.cuda.get_rng_state_all()
    return tree


def restore(tree: Mapping[str, Any]) -> None:
    python = tree["python"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    if (found := tree.get("numpy")) is not None:
        import numpy

        numpy.random.set_state((found["name"], found["key"], found["position"], found["has_gauss"], found["gauss"]))
    if (found := tree.get("torch")) is not None:
        import torch

        torch.set_rng_state(found)
        # Of GPUs that are no longer visible nothing is drawn any more.
        for index, of_device in enumerate(tree.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(of_device, index)


def write(tree: Mapping[str, Any], directory: Path, rank: int) -> dict[str, str]:
    """Write the state of one rank into a checkpoint; returns the digests of its files, by name."""
    return write_small(tree, directory, f"rng-{rank}")


def read(directory: Path, rank: int, *, digests: Mapping[str, str] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = read_small(directory, f"rng-{rank}", digests=digests)
    return found


def file_of(rank: int) -> str:
    """The file whose presence shows that a checkpoint has the state of a rank."""
    return f"rng-{rank}.json"


KEY_FILE = "key.json"


def key_files(key: Any) -> dict[str, str]:
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(key, jax.Array) or not key.is_fully_addressable:
        return {}
    typed = bool(jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key))
    words = jax.random.key_data(key) if typed else key
    if words.dtype != "uint32":
        return {}
    kind = str(jax.random.key_impl(key)) if typed else None
    return {KEY_FILE: json.dumps({"words": words.tolist(), "kind": kind})}


def key_from_json(data: bytes) -> Any:
    import jax
    import jax.numpy

    document = json.loads(data)
    words = jax.numpy.asarray(document["words"], dtype="uint32")
    return words if document["kind"] is None else jax.random.wrap_key_data(words, impl=document["kind"])
