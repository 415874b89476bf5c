"""Arrays of JAX as leaves, saved and read by Orbax. Imported when a tree holds one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from trainmaster.jobs.trees.structure import ANYTHING, Described, WantedArray

DIRECTORY = "orbax"


def describe(value: object) -> Described | None:
    """Describe an array, or the shape of one in a template; None for all else. Raises TypeError if it is traced."""
    if not isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        return None
    if isinstance(value, jax.core.Tracer):
        raise TypeError("a traced array: save outside of jit")
    extra = {"key": str(jax.random.key_impl(value))} if _is_key(value) and isinstance(value, jax.Array) else {}
    identity = ("jax", id(value))
    return Described(kind="jax", dtype=str(value.dtype), shape=tuple(value.shape), identity=identity, extra=extra)


def start(arrays: Mapping[str, Any], directory: Path) -> Callable[[], None]:
    """Begin to save arrays, each process its part; they may be deleted now. Call the result to wait for the files."""
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    plain = {name: _plain(value) for name, value in arrays.items()}
    checkpointer.save((directory / DIRECTORY).absolute(), args=ocp.args.PyTreeSave(plain))

    def finish() -> None:
        try:
            checkpointer.wait_until_finished()
        finally:
            checkpointer.close()

    return finish


def read(directory: Path, wanted: Sequence[WantedArray]) -> list[jax.Array]:
    """Read arrays onto the devices of their templates, sharded as those are."""
    structs: dict[str, jax.ShapeDtypeStruct] = {}
    for leaf in wanted:
        structs.setdefault(leaf.node["name"], _struct(leaf))
    restored = _restore(directory / DIRECTORY, structs, partial=True)
    return [_finished(leaf, restored[leaf.node["name"]]) for leaf in wanted]


def read_tree(directory: Path, template: object, *, partial: bool) -> Any:
    """Read a tree that Orbax saved by itself, onto the devices of the template and sharded as that is."""
    structs = jax.tree_util.tree_map(
        lambda leaf: _shaped(leaf.shape, leaf.dtype, leaf.sharding) if isinstance(leaf, jax.Array) else leaf, template
    )
    return _restore(directory, structs, partial=partial)


def _restore(directory: Path, structs: Any, *, partial: bool) -> Any:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(
            directory.absolute(),
            args=ocp.args.PyTreeRestore(
                item=structs, restore_args=ocp.checkpoint_utils.construct_restore_args(structs), partial_restore=partial
            ),
        )


def _plain(value: jax.Array) -> jax.Array:
    """What Orbax can save: the words of a key, and arrays that span all processes."""
    array = jax.random.key_data(value) if _is_key(value) else value
    if jax.process_count() == 1 or not array.is_fully_addressable:
        return array
    # The array of process 0 counts, as for other libraries: on the others it should be the same.
    from jax.experimental import multihost_utils

    everywhere = jax.sharding.Mesh(jax.devices(), ("everywhere",))
    value_of_first = multihost_utils.broadcast_one_to_all(array)
    replicated = jax.sharding.PartitionSpec()  # type: ignore[no-untyped-call]
    whole: jax.Array = multihost_utils.host_local_array_to_global_array(value_of_first, everywhere, replicated)
    return whole


def _struct(leaf: WantedArray) -> jax.ShapeDtypeStruct:
    sharding = None if leaf.template is ANYTHING else leaf.template.sharding
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if "key" not in leaf.node:
        return _shaped(tuple(leaf.node["shape"]), leaf.node["dtype"], sharding)
    # The words of a key lie where the key does.
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=leaf.node["key"])))
    return _shaped((*leaf.node["shape"], *words.shape), words.dtype, sharding)


def _shaped(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _finished(leaf: WantedArray, array: jax.Array) -> jax.Array:
    if isinstance(leaf.template, jax.Array) and not leaf.template.committed:
        # A scalar or key that was not committed to a device must combine with sharded arrays, as it did before.
        array = jax.numpy.asarray(jax.device_get(array))
    return jax.random.wrap_key_data(array, impl=leaf.node["key"]) if "key" in leaf.node else array


def _is_key(value: Any) -> bool:
    return bool(jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key))
