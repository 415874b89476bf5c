"""One of one or more JAX processes with a job class: saves, or goes on from what another number of them saved."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trainmaster.jobs import ExecutionSpec, RestoreableJob
from trainmaster.jobs.checkpoint_reader import InexactResumeError
from trainmaster.jobs.process import connected


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    rows: int = 8


class Grid(RestoreableJob[GridConfig]):
    """Rows that are sharded over all devices of all processes."""

    def __init__(self, spec: ExecutionSpec, config: Any = None) -> None:
        super().__init__(spec, config)
        assert spec.topology is not None
        self.sharding = NamedSharding(spec.topology.mesh, P("batch"))
        self.state = self.filled(0.0)
        self.step = 0

    def filled(self, first: float) -> dict[str, jax.Array]:
        values = np.arange(self.config.rows, dtype=np.float32) + np.float32(first)
        rows = jax.make_array_from_callback(values.shape, self.sharding, lambda index: values[index])
        return {"rows": rows, "scale": jnp.full((), first)}

    def run(self) -> None: ...

    def restore_from_path(self, rel_path: str | os.PathLike[str]) -> None:
        self.state, metadata = self.get_tree_and_metadata_from_path(rel_path, self.state)
        self.step = metadata["step"]


def refused(spec: ExecutionSpec) -> bool:
    try:
        Grid.from_checkpoint("latest", spec, resume=True)
    except InexactResumeError:
        return True
    return False


def main(root: Path, step: int) -> None:
    spec = ExecutionSpec.local(root, "grid")
    said: dict[str, Any] = {"hosts": len(spec.hardware.hosts), "devices": jax.device_count()}
    if step == 1:
        job = Grid(spec)
    else:
        said["refused"] = refused(spec)
        job, _ = Grid.from_checkpoint("latest", spec, resume=True, elastic=True)
        rows = {shard.index[0].start: shard.data.tolist() for shard in job.state["rows"].addressable_shards}
        said |= {"step": job.step, "rows": [rows[start] for start in sorted(rows)], "scale": float(job.state["scale"])}
    job.state = job.filled(10.0 * step)
    job.save_tree_and_metadata(f"steps/{step}", job.state, {"step": step})
    job.register(f"steps/{step}")
    job()
    print(json.dumps(said))


if __name__ == "__main__":
    with connected():
        main(Path(sys.argv[1]), int(sys.argv[2]))
