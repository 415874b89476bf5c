"""Trees of JAX arrays, sharded over four simulated devices. Run by test_jax.py."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import assert_no_pickle
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from patience import PATIENCE_S
from trainmaster.jobs import trees
from trainmaster.jobs.checkpoint import CorruptCheckpointError
from trainmaster.jobs.checkpoint_saver import Saver
from trainmaster.jobs.roots import open_root
from trainmaster.jobs.trees import TreeError

MESH = jax.make_mesh((2, 2), ("a", "b"))


class State(NamedTuple):
    """As optimizers have it."""

    count: Any
    moments: Any


@jax.tree_util.register_dataclass
@dataclass
class Model:
    """A node that JAX knows."""

    w: Any
    b: Any


def sharded(array: Any, *spec: str | None) -> jax.Array:
    return jax.device_put(array, NamedSharding(MESH, P(*spec)))


def equal(left: Any, right: Any) -> bool:
    return left.dtype == right.dtype and bool(np.array_equal(np.asarray(left), np.asarray(right)))


def test_arrays_come_back_sharded_as_they_were(tmp_path: Path) -> None:
    tree = {
        "w": sharded(jnp.arange(64.0).reshape(8, 8), "a", "b"),
        "half": sharded(jnp.arange(16, dtype=jnp.bfloat16), "b"),
        "state": State(count=jnp.int32(3), moments=[sharded(jnp.ones((4, 2)), "a", None)]),
        "host": np.arange(3),
        "step": 5,
    }
    digests = trees.write(tree, tmp_path)
    found = trees.read(tmp_path, tree, digests=digests)
    assert type(found["state"]) is State
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(found), strict=True)
    for before, after in pairs:
        assert type(before) is type(after)
        if isinstance(before, jax.Array):
            assert before.sharding == after.sharding
            assert equal(before, after)
    assert found["step"] == 5
    assert np.array_equal(found["host"], tree["host"])
    assert_no_pickle(tmp_path)


def test_arrays_are_resharded_as_the_template_is(tmp_path: Path) -> None:
    array = sharded(jnp.arange(64.0).reshape(8, 8), "a", "b")
    trees.write({"w": array}, tmp_path)
    for sharding in (
        NamedSharding(MESH, P("b", None)),
        NamedSharding(jax.make_mesh((4,), ("x",)), P(None, "x")),
        jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    ):
        struct = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
        found = trees.read(tmp_path, {"w": struct})["w"]
        assert found.sharding == sharding
        assert equal(found, array)
    assert equal(trees.read(tmp_path)["w"], array)


def test_partial_restore_takes_the_weights_and_leaves_the_optimizer(tmp_path: Path) -> None:
    trees.write(
        {"params": {"w": sharded(jnp.ones(8), "a"), "old": jnp.ones(3)}, "opt": State(jnp.int32(1), [1])}, tmp_path
    )
    kept = jnp.full(5, 7.0)
    template = {"params": {"w": sharded(jnp.zeros(8), "b"), "old": kept, "new": kept}}
    found = trees.read(tmp_path, template, partial=True)
    assert equal(found["params"]["w"], jnp.ones(8))
    assert found["params"]["w"].sharding == template["params"]["w"].sharding
    assert found["params"]["old"] is kept
    assert found["params"]["new"] is kept
    with pytest.raises(TreeError, match=r"params/new: the template has it.*"):
        trees.read(tmp_path, template)


def test_registered_nodes_are_rebuilt(tmp_path: Path) -> None:
    model = Model(w=jnp.ones((2, 2)), b=jnp.zeros(2))
    trees.write({"model": model}, tmp_path)
    found = trees.read(tmp_path, {"model": Model(w=jnp.zeros((2, 2)), b=jnp.ones(2))})["model"]
    assert isinstance(found, Model)
    assert equal(found.w, model.w)
    assert equal(found.b, model.b)
    with pytest.raises(TreeError, match="model: a checkpoint cannot hold"):
        trees.write({"model": object()}, tmp_path / "other")


def test_keys_go_on_where_they_were(tmp_path: Path) -> None:
    typed, raw = jax.random.key(3), jax.random.PRNGKey(4)
    many = jax.random.split(jax.random.key(5, impl="rbg"), 4)
    trees.write({"typed": typed, "raw": raw, "many": many}, tmp_path)
    found = trees.read(tmp_path, {"typed": jax.random.key(0), "raw": jax.random.PRNGKey(0), "many": many})
    assert jax.random.normal(found["typed"]) == jax.random.normal(typed)
    assert jax.random.normal(found["raw"]) == jax.random.normal(raw)
    assert equal(jax.random.key_data(found["many"]), jax.random.key_data(many))


def test_saver_saves_and_finds_damage(tmp_path: Path) -> None:
    tree = {"w": sharded(jnp.arange(8.0), "a"), "key": jax.random.key(1)}
    with Saver(open_root(tmp_path)) as saver:
        saver.save(tree, rel_path="c-1", step=1)
        saver.save(tree, rel_path="c-2", step=2)
        saver.wait()
        loaded = saver.load("c-2", tree, exact=True)
        assert equal(loaded.tree["w"], tree["w"])
        assert loaded.manifest.framework == "jax"
        assert_no_pickle(tmp_path)
        damaged = next(
            path for path in (tmp_path / "c-2" / "orbax").rglob("*") if path.is_file() and path.parent.name == "d"
        )
        damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
        with pytest.raises(CorruptCheckpointError, match=damaged.name):
            saver.load("c-2", tree)
        assert saver.load_latest_good(tree)[0] == "c-1"


def test_array_may_be_donated_while_it_is_saved(tmp_path: Path) -> None:
    step = jax.jit(lambda array: array * 0, donate_argnums=0)
    array = sharded(jnp.ones(1 << 16), "a")
    with Saver(open_root(tmp_path)) as saver:
        saver.save({"w": array}, rel_path="c", step=1)
        step(array)
        saver.wait()
        assert bool((np.asarray(saver.load("c").tree["w"]) == 1).all())


def test_several_processes_save_and_load_together(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    script = Path(__file__).with_name("jax_rank.py")
    environ = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in said)
    assert [first["me"], second["me"]] == [[0, 2], [1, 2]]
    assert first["heard"] == second["heard"] == {"from": 0, "text": "ü" * 100}
    assert [first["gathered"], second["gathered"]] == [[[], [7]], []]
    assert first["flags"] == second["flags"] == [True, False]
    assert [first["gpus"], second["gpus"]] == ["0", "1"]
    assert first["told"] == ""
    assert "process 1 is at 'point 1', but process 0 is at 'point 0'" in second["told"]
    assert first["local"] == [0.0, 1.0]
    assert second["local"] == [2.0, 3.0]
    assert first["resharded"] == second["resharded"] == [0.0, 1.0, 2.0, 3.0]
    assert first["single"] == second["single"] == [0.0]
