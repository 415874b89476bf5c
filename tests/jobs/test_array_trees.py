"""Trees of NumPy arrays, tensors and plain values: what is saved comes back to the bit, or not at all."""

from __future__ import annotations

import enum
import json
import math
import sys
from collections import OrderedDict, namedtuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from checkpoint_files import assert_no_pickle, same, torch_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trainmaster.jobs import trees
from trainmaster.jobs.checkpoint import CorruptCheckpointError
from trainmaster.jobs.trees import ANYTHING, Buffers, TreeError, writer

# PyTorch says so of every tensor of complex32.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

TORCH_TYPES = sorted(
    (
        value
        for value in vars(torch).values()
        # The rest has no bytes of its own: quantized types need a scale, and those below a byte are shells.
        if isinstance(value, torch.dtype)
        and str(value)[6:].lstrip("u").startswith(("bool", "int", "float", "bf", "complex"))
    ),
    key=str,
)
TORCH_TYPES = [
    dtype
    for dtype in dict.fromkeys(TORCH_TYPES)
    if str(dtype)[6:] not in {f"{u}int{n}" for u in ("u", "") for n in range(1, 8)}
]

numpy_arrays = arrays.arrays(
    dtype=st.one_of(
        arrays.scalar_dtypes().filter(lambda dtype: dtype.kind not in "Mm" or dtype.str[1:] != "m8"),
        arrays.byte_string_dtypes(min_len=1, max_len=3),
    ),
    shape=arrays.array_shapes(min_dims=0, min_side=0, max_side=4),
)
tensors = st.builds(
    lambda dtype, shape, seed, transposed: _tensor(dtype, shape, seed, transposed=transposed),
    st.sampled_from(TORCH_TYPES),
    arrays.array_shapes(min_dims=0, min_side=0, max_side=4),
    st.integers(0, 2**31),
    st.booleans(),
)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(exclude_categories=()), max_size=8),
)
keys = st.one_of(st.text(max_size=5), st.integers(-3, 10**20))
any_tree = st.recursive(
    st.one_of(plain, numpy_arrays, tensors),
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=4), st.lists(inner, max_size=4), st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int, *, transposed: bool) -> torch.Tensor:
    """Of random bytes: also those that are no numbers."""
    count = math.prod(shape)
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count * dtype.itemsize,), generator=generator)
    found = raw.to(torch.uint8).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
    return found.mT if transposed and len(shape) > 1 else found


@settings(max_examples=60)
@given(tree=any_tree)
def test_tree_saved_and_read_is_the_same_to_the_bit(tree: Any) -> None:
    with TemporaryDirectory() as name:
        trees.write(tree, Path(name))
        assert same(trees.read(Path(name)), tree)
        assert same(trees.read(Path(name), tree), tree)


@settings(max_examples=50)
@given(tree=any_tree, limit=st.integers(8, 64))
def test_tree_saved_in_many_small_files_is_the_same(tree: Any, limit: int) -> None:
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "SHARD_BYTES", limit)
        digests = trees.plan(tree).start(Path(name), Buffers(0)).result()
        assert same(trees.read(Path(name), tree, digests=digests), tree)
        assert set(digests) == {path.name for path in Path(name).iterdir()}


@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
def test_tensor_of_any_type_comes_back_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = _tensor(dtype, (3, 5), 7, transposed=True)
    trees.write({"x": tensor, "scalar": tensor[0, 0], "empty": tensor[:0]}, tmp_path)
    found = trees.read(tmp_path)
    assert found["x"].dtype is dtype
    assert torch_bytes(found["x"]) == torch_bytes(tensor)
    assert found["scalar"].shape == ()
    assert found["empty"].shape == (0, 3)


def test_files_are_read_by_the_safetensors_package(tmp_path: Path) -> None:
    tree = {"model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}}
    trees.write(tree, tmp_path)
    found = safetensors.torch.load_file(tmp_path / "arrays-00000.safetensors")
    assert same(dict(sorted(found.items())), {"model.a": tree["model"]["a"], "model.b": tree["model"]["b"]})


def test_arrays_of_both_libraries_share_a_file(tmp_path: Path) -> None:
    tree = {"t": torch.ones(3, dtype=torch.int16), "n": np.arange(5.0), "s": np.float32(2)}
    trees.write(tree, tmp_path)
    assert same(trees.read(tmp_path), tree)
    assert set(safetensors.numpy.load_file(tmp_path / "arrays-00000.safetensors")) == {"t", "n", "s"}


def test_no_pickle_is_written(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tree = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "n": np.arange(3)}
    trees.write(tree, tmp_path)
    assert_no_pickle(tmp_path)
    found = trees.read(tmp_path)
    optimizer.load_state_dict(found["optimizer"])
    assert same(found["optimizer"], tree["optimizer"])


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    tree = {"embedding": weight, "head": weight.detach(), "slice": weight[:2]}
    trees.write(tree, tmp_path)
    assert (tmp_path / "arrays-00000.safetensors").stat().st_size < 1.5 * weight.nbytes
    found = trees.read(tmp_path, tree)
    assert found["embedding"].data_ptr() == found["head"].data_ptr()
    assert same(found, {**tree, "head": weight})


def test_tree_may_change_as_soon_as_it_was_staged(tmp_path: Path) -> None:
    weight, array = torch.ones(1000), np.ones(1000)
    plan = trees.plan({"w": weight, "a": array})
    writing_ = plan.start(tmp_path)
    weight.zero_()
    array[:] = 0
    writing_.result()
    found = trees.read(tmp_path)
    assert bool((found["w"] == 1).all())
    assert bool((found["a"] == 1).all())


def test_containers_come_back_as_the_template_has_them(tmp_path: Path) -> None:
    pair = namedtuple("pair", ["x", "y"])
    tree = {"o": OrderedDict(b=1, a=2), "p": pair(1, torch.zeros(2)), "m": torch.nn.Linear(2, 2).state_dict()}
    trees.write(tree, tmp_path)
    found = trees.read(tmp_path, tree)
    assert type(found["p"]) is pair
    assert type(found["m"]) is OrderedDict
    assert list(found["o"]) == ["b", "a"]
    assert type(trees.read(tmp_path)["p"]) is tuple


def test_names_that_would_collide_are_told_apart(tmp_path: Path) -> None:
    tree = {"a": {"b": np.array(1)}, "a.b": np.array(2), 1: np.array(3), "1": np.array(4), "__metadata__": np.array(5)}
    trees.write(tree, tmp_path)
    assert same(trees.read(tmp_path), tree)


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (object(), "model/0/x: a checkpoint cannot hold a builtins.object"),
        ({1, 2}, "model/0/x: a checkpoint cannot hold a builtins.set"),
        (b"bytes", "model/0/x: a checkpoint cannot hold a builtins.bytes"),
        (1j, "model/0/x: a checkpoint cannot hold a builtins.complex"),
        (Colour.RED, "model/0/x: a checkpoint cannot hold a test_array_trees.Colour"),
        ({1.5: 1}, "model/0/x: a key must be a string or an integer, not 1.5"),
        ({True: 1}, "model/0/x: a key must be a string or an integer, not True"),
        (np.array([object()]), "model/0/x: a checkpoint cannot hold an array of object"),
        (np.zeros(2, dtype=[("a", "i4")]), "model/0/x: a checkpoint cannot hold an array of"),
        (torch.eye(3).to_sparse(), "model/0/x: a checkpoint cannot hold a sparse or quantized tensor"),
        (torch.empty(3, device="meta"), "model.0.x: a checkpoint cannot hold a meta tensor"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_leaf_of_unknown_type_is_refused_with_its_path(leaf: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TreeError) as caught:
        trees.write({"model": [{"x": leaf}]}, tmp_path)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_tree_that_contains_itself_is_refused(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"a": {}}
    tree["a"]["b"] = tree
    with pytest.raises(TreeError, match="a/b: the tree contains itself"):
        trees.write(tree, tmp_path)


SAVED = {"model": {"w": torch.ones(2, 3), "b": torch.ones(3)}, "optimizer": {"m": torch.ones(5)}, "step": 7}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({**SAVED, "model": {"w": torch.zeros(2, 3)}}, "model/b: the checkpoint has it, the template has not"),
        ({**SAVED, "extra": 1}, "extra: the template has it, the checkpoint has not"),
        ({**SAVED, "optimizer": {"m": torch.zeros(6)}}, "optimizer/m: the checkpoint has torch float32 [5]"),
        (
            {**SAVED, "optimizer": {"m": torch.zeros(5, dtype=torch.float64)}},
            "optimizer/m: the checkpoint has torch float32 [5], the template torch float64 [5]",
        ),
        ({**SAVED, "optimizer": {"m": np.zeros(5, np.float32)}}, "the template numpy float32 [5]"),
        ({**SAVED, "step": torch.zeros(1)}, "step: the checkpoint has 7, the template torch float32 [1]"),
        ({**SAVED, "step": {}}, "step: the checkpoint has 7, the template a dict of 0"),
        ({**SAVED, "optimizer": [1]}, "optimizer: the checkpoint has a dict of 1, the template a list of 1"),
        ({**SAVED, "step": object()}, "step: the template has a builtins.object"),
    ],
)
def test_whole_restore_into_another_tree_is_refused_with_the_paths(template: Any, message: str, tmp_path: Path) -> None:
    trees.write(SAVED, tmp_path)
    with pytest.raises(TreeError) as caught:
        trees.read(tmp_path, template)
    assert message in str(caught.value)


def test_many_mismatches_are_counted(tmp_path: Path) -> None:
    trees.write({str(index): index for index in range(30)}, tmp_path)
    with pytest.raises(TreeError, match="and 20 more"):
        trees.read(tmp_path, {})


def test_partial_restore_takes_what_fits_and_keeps_the_rest(tmp_path: Path) -> None:
    trees.write({**SAVED, "list": [torch.ones(1), 2]}, tmp_path)
    kept = torch.full((4,), 9.0)
    found = trees.read(
        tmp_path,
        {"model": {"w": torch.zeros(2, 3), "b": kept, "new": 5}, "list": [0], "optimizer": 3, "absent": {"x": kept}},
        partial=True,
    )
    assert same(found["model"]["w"], torch.ones(2, 3))
    assert found["model"]["b"] is kept
    assert found["model"]["new"] == 5
    assert found["list"] == [0]
    assert found["optimizer"] == 3
    assert found["absent"]["x"] is kept
    assert "step" not in found


def test_partial_restore_does_not_read_what_it_does_not_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 8)
    digests = trees.write({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path)
    (tmp_path / "arrays-00001.safetensors").unlink()
    found = trees.read(tmp_path, {"a": torch.zeros(4)}, partial=True, digests=digests)
    assert same(found, {"a": torch.ones(4)})


def test_anything_in_a_template_takes_what_was_saved(tmp_path: Path) -> None:
    trees.write(SAVED, tmp_path)
    found = trees.read(
        tmp_path, {"model": {"w": torch.empty(2, 3, device="meta"), "b": ANYTHING}, "optimizer": ANYTHING, "step": 0}
    )
    assert same(found, SAVED)


def test_template_is_not_changed(tmp_path: Path) -> None:
    trees.write(SAVED, tmp_path)
    template = {"model": {"w": torch.zeros(2, 3), "b": torch.zeros(3)}, "optimizer": {"m": torch.zeros(5)}, "step": 0}
    trees.read(tmp_path, template)
    assert not template["model"]["w"].any()


@pytest.mark.parametrize("name", ["arrays-00000.safetensors", "tree.json"])
@pytest.mark.parametrize("at", [0, 100, -1])
def test_flipped_byte_is_found(name: str, at: int, tmp_path: Path) -> None:
    digests = trees.write(SAVED, tmp_path)
    data = bytearray((tmp_path / name).read_bytes())
    data[at] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=name):
        trees.read(tmp_path, digests=digests)


@pytest.mark.parametrize("keep", [0, 5, 40, -1])
def test_short_file_is_found_without_digests(keep: int, tmp_path: Path) -> None:
    trees.write(SAVED, tmp_path)
    path = tmp_path / "arrays-00000.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptCheckpointError, match=r"arrays-00000\.safetensors"):
        trees.read(tmp_path)


def test_missing_file_is_found(tmp_path: Path) -> None:
    trees.write(SAVED, tmp_path)
    (tmp_path / "arrays-00000.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="No such file"):
        trees.read(tmp_path)


def test_tree_of_a_later_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_text(json.dumps({"version": 2, "tree": {"value": 1}}))
    with pytest.raises(TreeError, match="version 2"):
        trees.read(tmp_path)


def test_tree_that_names_a_file_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    trees.write(SAVED, tmp_path)
    text = (tmp_path / "tree.json").read_text()
    (tmp_path / "inner" / "tree.json").write_text(text.replace('"arrays-', '"../arrays-'))
    with pytest.raises(CorruptCheckpointError, match="is no file of a checkpoint"):
        trees.read(tmp_path / "inner")


def test_full_disk_is_an_error_of_the_result(tmp_path: Path) -> None:
    (tmp_path / "arrays-00000.safetensors").symlink_to("/dev/full")
    started = trees.plan({"x": torch.ones(3)}).start(tmp_path)
    with pytest.raises(OSError, match=r"arrays-00000|No space"):
        started.result()


def test_staging_memory_stays_below_its_limit_and_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SHARD_BYTES", 1 << 20)
    size = 1 << 20
    tree = {str(index): torch.full((size,), index, dtype=torch.uint8) for index in range(16)}
    buffers = Buffers(limit=4 << 20)
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        trees.plan(tree).start(directory, buffers).result()
        assert same(trees.read(directory), tree)
        assert buffers.allocated <= 4 << 20
    buffers.close()
    assert buffers.allocated == 0


def test_numpy_alone_needs_no_torch(tmp_path: Path) -> None:
    """A module of torch in sys.modules is only looked at when it is there."""
    assert "jax" not in sys.modules
    trees.write({"a": np.arange(3)}, tmp_path)
    document = json.loads((tmp_path / "tree.json").read_text())
    assert document["tree"]["dict"][0][1]["array"] == "numpy"
