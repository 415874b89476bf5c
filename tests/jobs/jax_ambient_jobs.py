"""Job classes in the form of theseus: made of their spec alone, configured by an ambient, nested configuration.

Run by test_jax.py, with four simulated devices.
"""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import yaml
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from omegaconf import DictConfig, OmegaConf

from trainmaster.jobs import (
    Axis,
    CheckpointedJob,
    ExecutionSpec,
    PyTree,
    RestoreableJob,
    Topology,
    _BaseJob,
    build,
    configuration,
    configure,
    current_config,
    field,
    job,
    patch,
    runner,
)
from trainmaster.jobs.config_document import ConfigurationError
from trainmaster.jobs.runner import RunError, RunRequest
from trainmaster.jobs.spec import Cluster


class Style(Enum):
    DENSE = "dense"
    SPARSE = "sparse"


@dataclass
class Source:
    name: str
    style: Style = Style.DENSE


@dataclass
class ModelConfig:
    rows: int = field("architecture/rows", default=8)
    bias: bool = field("architecture/bias", default=False)


@dataclass
class OptimizerConfig:
    rate: float = field("optimization/rate", default=0.1)


@dataclass
class TrainerConfig:
    steps: int = field("training/steps", default=6)
    rows: int = field("architecture/rows", default=8)
    sources: list[Source] = field("training/sources", default_factory=lambda: [Source("noise", Style.SPARSE)])  # noqa: RUF009
    score_every: int = field("logging/score_every", default=1)


C = TypeVar("C", bound=TrainerConfig)


class Trainer(RestoreableJob[C], Generic[C]):
    """Draws the weights towards noise, and keeps the best and the last."""

    MODEL = ModelConfig

    @classmethod
    def config(cls) -> list[type[Any]]:
        return [TrainerConfig, cls.MODEL, OptimizerConfig]

    def __init__(self, spec: ExecutionSpec) -> None:
        super().__init__(spec)
        self.described = spec.model_dump_json(indent=2)
        assert spec.topology is not None
        self.topology: Topology = spec.topology
        self.mesh = spec.topology.mesh
        self.model = configure(self.MODEL)
        self.key, start = jax.random.split(self.key)
        weights = jax.random.normal(start, (self.model.rows, 4))
        self.state: PyTree[jax.Array] = {
            "w": jax.device_put(weights, NamedSharding(self.mesh, P(Axis.BATCH, Axis.SHARD)))
        }
        self.best_score, self.steps = float("-inf"), 0
        if self.main_process():
            self.spec.id = f"run-of-{spec.name}"

    @property
    def done(self) -> bool:
        return self.steps >= self.args.steps

    def run(self) -> None:
        rate = configure(OptimizerConfig).rate  # while it runs, too
        while self.steps < self.args.steps:
            self.key, drawn = jax.random.split(self.key)
            self.state = {"w": self.state["w"] + rate * jax.random.normal(drawn, self.state["w"].shape)}
            self.steps += 1
            if self.steps % self.args.score_every == 0:
                self.best_score = float(self.steps)
                self.save(Path("best"))
            if self.steps == self.stop_at:
                raise KeyboardInterrupt
        self.save(Path("final") / str(self.steps))

    stop_at = -1

    def save(self, suffix: Path) -> None:
        self.save_tree_and_metadata(suffix, self.state, {"steps": self.steps, "score": self.best_score})
        self.register(suffix)

    def restore_from_path(self, rel_path: str | Path) -> None:
        old = self.state
        self.state, metadata = self.get_tree_and_metadata_from_path(rel_path, old)
        jax.tree_util.tree_map(lambda leaf: leaf.delete(), old)
        self.steps, self.best_score = metadata["steps"], metadata.get("score", float("-inf"))


@job("test/ambient")
class Drawn(Trainer[TrainerConfig]):
    pass


def drawn(root: Path, name: str = "drawn", **training: Any) -> Drawn:
    config = build(*Drawn.config())
    config.training.steps = training.get("steps", 6)
    with configuration(config):
        return Drawn.local(str(root), name=name, shard_into=training.get("shard_into"))


def weights(job: Drawn) -> list[list[float]]:
    return np.asarray(job.state["w"]).tolist()


def test_job_that_is_made_of_its_spec_alone_runs_saves_and_goes_on(tmp_path: Path) -> None:
    whole = drawn(tmp_path / "whole")
    whole()
    cut = drawn(tmp_path / "cut")
    cut.stop_at = 4
    with pytest.raises(KeyboardInterrupt):
        cut()
    cut._settle()
    spec = ExecutionSpec.local(str(tmp_path / "cut"), name="drawn", project=None, group=None)
    assert Drawn.latest(spec) == "best"
    again, config = Drawn.from_checkpoint("best", spec, resume=True)
    assert (again.steps, again.best_score, config.training.steps, isinstance(config, DictConfig)) == (4, 4.0, 6, True)
    again()
    assert weights(again) == weights(whole)  # the key went on where it was
    assert Drawn.checkpoints(spec) == ["best", "final/6"]


def test_spec_of_the_old_form_is_taken(tmp_path: Path) -> None:
    found = drawn(tmp_path)
    assert isinstance(found, _BaseJob)
    assert (found.spec.project, found.spec.group, found.spec.id) == ("general", "default", "run-of-drawn")
    assert json.loads(found.described)["name"] == "drawn"
    assert dict(found.mesh.shape) == {"batch": 4, "shard": 1}
    assert found.main_process()
    assert Drawn._get_checkpoints_dir(found.spec) == tmp_path / "checkpoints"
    assert Drawn._get_checkpoint_rel_path(found.spec, Path("a/b")) == Path("general/default/drawn/a/b")
    assert CheckpointedJob._get_checkpoint_path(found.spec, "") == tmp_path / "checkpoints/general/default/drawn"
    assert found.args == TrainerConfig(sources=[Source("noise", Style.SPARSE)])
    found()
    saved = json.loads((Path(Drawn._get_checkpoint_path(found.spec, "final/6")) / "job.json").read_text())
    assert saved["id"] == "run-of-drawn"


def test_key_of_its_own_kind_is_restored(tmp_path: Path) -> None:
    first = drawn(tmp_path)
    first.key = jax.random.key(7)
    first.save(Path("a"))
    expected = jax.random.key_data(first.key).tolist()
    again, _ = Drawn.from_checkpoint("a", first.spec, resume=True)
    assert jax.random.key_data(again.key).tolist() == expected
    with configuration(again._ambient):
        other = Drawn.local(str(tmp_path), "other")
        before = other.key.tolist()
        other.restore_from_path("general/default/drawn/a")
    assert other.key.tolist() == before  # another job's


# -- the configuration --


def test_configuration_is_nested_and_holds_for_its_block_alone() -> None:
    assert current_config() is None
    with configuration({"architecture": {"rows": "16"}, "training": {"sources": [{"name": "x", "style": "SPARSE"}]}}):
        assert configure(ModelConfig) == ModelConfig(rows=16)
        assert configure(TrainerConfig).sources == [Source("x", Style.SPARSE)]
        with configuration(OmegaConf.create({"architecture": {"rows": 2, "bias": "${other}"}, "other": True})):
            assert configure(ModelConfig) == ModelConfig(rows=2, bias=True)
        with patch() as config:
            config.architecture.heads = 3
        assert current_config().architecture.heads == 3
    with pytest.raises(RuntimeError, match="configuration"):
        configure(ModelConfig)


def test_value_that_does_not_fit_or_is_missing_is_told_by_its_key() -> None:
    @dataclass
    class Needy:
        size: int = field("data/size")

    with (
        configuration({"architecture": {"rows": "many"}}),
        pytest.raises(ConfigurationError, match="architecture/rows"),
    ):
        configure(ModelConfig)
    with configuration({}), pytest.raises(ConfigurationError, match="data/size: required"):
        configure(Needy)
    with configuration(build(Needy)), pytest.raises(ConfigurationError, match="data/size: required"):
        configure(Needy)


def test_built_configuration_has_the_defaults_and_leaves_open_what_two_classes_see_differently() -> None:
    @dataclass
    class Other:
        rows: int = field("architecture/rows", default=9)
        bias: bool = field("architecture/bias", default=False)

    built = build(ModelConfig, TrainerConfig, Other)
    assert OmegaConf.is_missing(built.architecture, "rows")
    assert (built.architecture.bias, built.training.steps) == (False, 6)
    assert built.training.sources == [{"name": "noise", "style": "sparse"}]


def test_configuration_works_without_omegaconf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainmaster.jobs.ambient._omegaconf", lambda: None)
    with configuration({"architecture": {"rows": 3}}):
        assert current_config().architecture.rows == 3
        with patch() as config:
            config.architecture = {"rows": 4}
        assert configure(ModelConfig).rows == 4
    assert build(ModelConfig)["architecture"] == {"rows": 8, "bias": False}


# -- the runner --


def run(root: Path, *overrides: str, **fields: Any) -> None:
    runner.run(RunRequest(target="test/ambient", name="drawn", overrides=overrides, **fields), Cluster(root=str(root)))


def test_runner_gives_the_configuration_and_compares_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "training.steps=2", config={"optimization": {"rate": 0.5}})
    assert yaml.safe_load(capsys.readouterr().out)["training"]["steps"] == 2
    run(tmp_path, "training.steps=2", "optimization.rate=0.5")
    with pytest.raises(RunError, match=r"training\.steps: 2 -> 3"):
        run(tmp_path, "training.steps=3", "optimization.rate=0.5")
    run(tmp_path, "training.steps=3", overlay=True)
    with pytest.raises(RunError, match="did you mean 'steps'"):
        run(tmp_path, "training.step=3")
    spec = ExecutionSpec.local(tmp_path, "drawn")
    found, config = Drawn.from_checkpoint("latest", spec, resume=True)
    assert (found.steps, config.optimization.rate) == (3, 0.5)


def test_runner_goes_on_where_code_has_added_to_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def extended(self: Drawn) -> None:
        with patch() as config:
            config.architecture.layers = 32
        run_as_ever(self)

    run_as_ever = Drawn.run
    monkeypatch.setattr(Drawn, "run", extended)
    run(tmp_path, "training.steps=2")
    run(tmp_path, "training.steps=2")
    found, config = Drawn.from_checkpoint("latest", ExecutionSpec.local(tmp_path, "drawn"), resume=True)
    assert (found.steps, config.architecture.layers) == (2, 32)


class SpecAlone(RestoreableJob[TrainerConfig]):
    """Declares its configuration as a type, but takes the spec alone."""

    def __init__(self, spec: ExecutionSpec) -> None:
        super().__init__(spec)
        self.seen = self.config.steps

    def run(self) -> None:
        print(f"steps: {self.seen}")

    def restore_from_path(self, rel_path: str | Path) -> None: ...


def test_class_with_a_typed_configuration_may_take_its_spec_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = RunRequest(target=f"{__name__}:SpecAlone", name="x", overrides=("steps=3",))
    runner.run(request, Cluster(root=str(tmp_path)))
    assert "steps: 3" in capsys.readouterr().out
    assert SpecAlone.local(tmp_path).seen == 6


# -- checkpoints that theseus wrote --


def write_as_theseus(root: Path, tree: Any, metadata: dict[str, Any]) -> str:
    path = root / "checkpoints/general/default/old/ntoks/384"
    path.mkdir(parents=True)
    state = {"python_random": random.getstate(), "numpy_random": np.random.get_state(), "jax_random": 1}
    np.save(path / "rng.npy", np.array(state, dtype=object), allow_pickle=True)
    (path / "config.json").write_text(json.dumps(metadata))
    (path / "job.json").write_text(json.dumps({"name": "old", "id": None, "project": None, "group": None}))
    (path / "config.yaml").write_text("job: test/ambient\ntraining: {steps: 9, sources: [{name: a, style: DENSE}]}\n")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "checkpoint", tree, force=True)
        checkpointer.wait_until_finished()
    return "general/default/old/ntoks/384"


def test_checkpoint_of_theseus_is_restored_on_the_devices_of_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"w": jnp.arange(32.0).reshape(8, 4)}
    place = write_as_theseus(tmp_path, tree, {"steps": 5, "score": 0.25})
    monkeypatch.setattr(pickle, "load", lambda *_, **__: pytest.fail("nothing is unpickled"))
    spec = ExecutionSpec.local(tmp_path, "new", shard_into=2)
    found, config = RestoreableJob.from_checkpoint_path(place, spec)
    assert isinstance(found, Drawn)
    assert (found.steps, found.best_score, config.training.steps, found.spec.name) == (5, 0.25, 9, "new")
    assert found.args.sources == [Source("a", Style.DENSE)]
    assert weights(found) == tree["w"].tolist()
    assert found.state["w"].sharding == NamedSharding(spec.topology.mesh, P("batch", "shard"))  # type: ignore[union-attr]
    assert found.get_metadata_from_path(place) == {"steps": 5, "score": 0.25}
    resumed, _ = Drawn.from_checkpoint_path(place, spec, resume=True)
    assert resumed.spec.path == "general/default/old"
    partial, _ = found.get_tree_and_metadata_from_path(place, {"w": jnp.zeros((8, 4))}, partial=True)
    assert partial["w"].tolist() == tree["w"].tolist()


def test_run_begins_from_a_checkpoint_of_theseus(tmp_path: Path) -> None:
    place = write_as_theseus(tmp_path, {"w": jnp.zeros((8, 4))}, {"steps": 5})
    run(tmp_path, "training.steps=6", restore=place)
    found, _ = Drawn.from_checkpoint("latest", ExecutionSpec.local(tmp_path, "drawn"), resume=True)
    assert (found.steps, found.restored_from) == (6, place)


def test_checkpoint_of_theseus_whose_tree_is_not_complete_is_none(tmp_path: Path) -> None:
    place = write_as_theseus(tmp_path, {"w": jnp.zeros((8, 4))}, {"steps": 5})
    directory = tmp_path / "checkpoints" / place
    (directory / "checkpoint").rename(directory / "checkpoint.orbax-checkpoint-tmp-1")
    with pytest.raises(FileNotFoundError, match="no checkpoint is committed"):
        Drawn.from_checkpoint_path(place, ExecutionSpec.local(tmp_path, "new"))
