"""Job classes with JAX: a tree that is sharded over four simulated devices. Run by test_jax.py."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trainmaster.jobs import ExecutionSpec, RestoreableJob, job
from trainmaster.protocol.reasons import EXIT_STOPPED


@dataclass(frozen=True, kw_only=True)
class DriftConfig:
    steps: int = 4
    rate: float = 0.1


@job("test/drift")
class Drift(RestoreableJob[DriftConfig]):
    """Weights that drift by noise from a key, sharded as the topology says."""

    def __init__(self, spec: ExecutionSpec, config: Any = None) -> None:
        super().__init__(spec, config)
        assert spec.topology is not None
        self.mesh = spec.topology.mesh
        self.step = 0
        weights = jnp.arange(32.0).reshape(8, 4)
        self.state = {
            "params": {"w": jax.device_put(weights, NamedSharding(self.mesh, P("batch", "shard")))},
            "moments": {"w": jax.device_put(jnp.zeros((8, 4)), NamedSharding(self.mesh, P("shard", None)))},
            "key": jax.random.key(5),  # on no device in particular
        }

    @property
    def done(self) -> bool:
        return self.step >= self.config.steps

    def run(self) -> None:
        while self.step < self.config.steps:
            self.step += 1
            key, drawn = jax.random.split(self.state["key"])
            noise = jax.random.normal(drawn, (8, 4))
            moments = self.state["moments"]["w"] * 0.9 + noise
            weights = self.state["params"]["w"] + self.config.rate * moments
            self.state = {"params": {"w": weights}, "moments": {"w": moments}, "key": key}
            if self.checkpoint_due(self.step, every=2):
                self.save_tree_and_metadata(f"steps/{self.step}", self.state, {"step": self.step})
                self.register(f"steps/{self.step}")
            self.exit_if_stopped()

    def restore_from_path(self, rel_path: str | os.PathLike[str]) -> None:
        self.state, metadata = self.get_tree_and_metadata_from_path(rel_path, self.state)
        if self.is_own(rel_path):
            self.step = metadata["step"]


def drift(root: Path, name: str = "drift", shard_into: int = 2, **config: Any) -> Drift:
    return Drift.local(root, name, config=config, shard_into=shard_into)


def same(one: jax.Array, other: jax.Array) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other))


def test_topology_is_a_grid_of_replicas_and_shards(tmp_path: Path) -> None:
    topology = ExecutionSpec.local(tmp_path, "x", shard_into=2).topology
    assert topology is not None
    assert (topology.device_count, topology.replicas, topology.chip.name) == (4, 2, "cpu")
    assert dict(topology.mesh.shape) == {"batch": 2, "shard": 2}
    with pytest.raises(ValueError, match="must divide the 4 devices"):
        ExecutionSpec.local(tmp_path, "x", shard_into=3)


def test_tree_comes_back_on_the_devices_that_the_template_says(tmp_path: Path) -> None:
    job = drift(tmp_path)
    job()
    again = drift(tmp_path, shard_into=4)
    tree, metadata = again.get_tree_and_metadata("steps/4", again.state)
    assert metadata == {"step": 4}
    assert same(tree["params"]["w"], job.state["params"]["w"])
    assert tree["params"]["w"].sharding == again.state["params"]["w"].sharding != job.state["params"]["w"].sharding
    assert same(jax.random.key_data(tree["key"]), jax.random.key_data(job.state["key"]))


def test_partial_load_takes_the_weights_without_the_moments(tmp_path: Path) -> None:
    job = drift(tmp_path, "trained")
    job()
    other = drift(tmp_path, "inference")
    template = {"params": {"w": jnp.zeros((8, 4)), "new": jnp.full(3, 7.0)}}
    place = "general/default/trained/steps/4"
    tree, _ = other.get_tree_and_metadata_from_path(place, template, partial=True)
    assert same(tree["params"]["w"], job.state["params"]["w"])
    assert tree["params"]["new"].tolist() == [7.0] * 3
    with pytest.raises(Exception, match="new"):
        other.get_tree_and_metadata_from_path(place, template)


def test_resumed_run_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drift(tmp_path / "whole", steps=6)
    whole()
    cut = drift(tmp_path / "cut", steps=6)
    monkeypatch.setattr(cut._requests, "_signalled", True)
    with pytest.raises(SystemExit) as stopped:
        cut()
    assert stopped.value.code == EXIT_STOPPED
    assert Drift.latest(cut.spec) == "steps/1"
    resumed, config = Drift.from_checkpoint("latest", cut.spec, resume=True)
    assert (resumed.step, config.steps) == (1, 6)
    resumed()
    assert same(resumed.state["params"]["w"], whole.state["params"]["w"])
    assert same(resumed.state["moments"]["w"], whole.state["moments"]["w"])


@pytest.mark.parametrize("resume", [True, False])
def test_identity_and_configuration_from_another_jobs_checkpoint(tmp_path: Path, resume: bool) -> None:
    drift(tmp_path, "original", rate=0.5)()
    spec = ExecutionSpec.local(tmp_path, "branch", shard_into=2)
    found, config = RestoreableJob.from_checkpoint_path(
        "general/default/original/steps/4", spec, {"steps": 9}, resume=resume
    )
    assert isinstance(found, Drift)
    assert config == DriftConfig(steps=9, rate=0.5)
    assert (found.spec.name, found.step) == (("original", 4) if resume else ("branch", 0))
    assert spec.name == "branch"
