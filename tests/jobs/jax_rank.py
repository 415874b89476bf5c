"""One of several JAX processes: talks to the others, saves a tree with them and loads it; prints what it saw."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trainmaster.jobs.checkpoint_saver import Saver
from trainmaster.jobs.process import ProcessError, connected, current_process
from trainmaster.jobs.roots import open_root


def main(rank: int, place: Path) -> None:
    mine = current_process()
    mine.barrier("start")
    said = {
        "me": [mine.index, mine.count],
        "heard": mine.broadcast({"from": rank, "text": "ü" * 100}, "word"),
        "gathered": [list(found) for found in mine.gather(bytes([7]) * rank)],
        "flags": [mine.any(rank == 1), mine.any(False)],
        "told": _at_different_points(rank),
        "gpus": jax.config.values["jax_cuda_visible_devices"],
    }
    mesh = jax.make_mesh((4,), ("x",))
    parts, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    array = jax.make_array_from_process_local_data(parts, np.arange(2.0, dtype=np.float32) + 2 * rank)
    with Saver(open_root(place / "root"), mine) as saver:
        saver.save({"w": array, "single": jnp.full(1, float(rank)), "step": 1}, rel_path="c", step=1)
        saver.wait()
        struct = {"w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=parts), "single": jnp.zeros(1), "step": 0}
        found = saver.load("c", struct, exact=True).tree
        struct["w"] = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=whole)
        again = saver.load("c", struct).tree
    said["local"] = sorted(float(shard.data[0]) for shard in found["w"].addressable_shards)
    said["resharded"] = np.asarray(again["w"].addressable_shards[0].data).tolist()
    said["single"] = np.asarray(found["single"]).tolist()
    mine.barrier("end")
    print(json.dumps(said))


def _at_different_points(rank: int) -> str:
    try:
        current_process().broadcast(1, f"point {rank}")
    except ProcessError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    with connected():
        main(int(os.environ["RANK"]), Path(sys.argv[1]))
