"""Arrays of JAX as leaves, saved and read by Orbax. Imported when a tree holds one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from trainmaster.jobs.trees.structure import ANYTHING, Described, Wanted

KIND = "jax"
DIRECTORY = "orbax"


def describe(value: Any) -> Described | None:
    """What this is, if it is an array, or the shape of one in a template.

    Raises:
        TypeError: it is no array yet.
    """
    if not isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        return None
    if isinstance(value, jax.core.Tracer):
        raise TypeError("a traced array: save outside of jit")
    extra = {"key": _implementation(value)} if _is_key(value) and isinstance(value, jax.Array) else {}
    identity = ("jax", id(value))
    return Described(kind=KIND, dtype=str(value.dtype), shape=tuple(value.shape), identity=identity, extra=extra)


def start(arrays: Mapping[str, Any], directory: Path) -> Callable[[], None]:
    """Begin to save arrays; when this returns they may be donated or deleted. Call the result to wait for the files.

    Collective where there are several processes: Orbax has every one write its part.
    """
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    plain = {name: _plain(value) for name, value in arrays.items()}
    checkpointer.save((directory / DIRECTORY).absolute(), args=ocp.args.PyTreeSave(plain))

    def finish() -> None:
        try:
            checkpointer.wait_until_finished()
        finally:
            checkpointer.close()

    return finish


def read(directory: Path, wanted: Sequence[Wanted]) -> list[Any]:
    """Arrays on the devices, and sharded, as the templates are."""
    structs: dict[str, jax.ShapeDtypeStruct] = {}
    for leaf in wanted:
        structs.setdefault(leaf.node["name"], _struct(leaf))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(
            (directory / DIRECTORY).absolute(),
            args=ocp.args.PyTreeRestore(
                item=structs,
                restore_args=ocp.checkpoint_utils.construct_restore_args(structs),
                partial_restore=True,
            ),
        )
    return [_finished(leaf, restored[leaf.node["name"]]) for leaf in wanted]


def read_tree(directory: Path, template: Any, *, partial: bool) -> Any:
    """A tree that Orbax saved by itself, with arrays on the devices, and sharded, as those of the template are.

    Raises:
        ValueError: the tree does not fit the template.
    """
    structs = jax.tree_util.tree_map(_like, template)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(
            directory.absolute(),
            args=ocp.args.PyTreeRestore(
                item=structs,
                restore_args=ocp.checkpoint_utils.construct_restore_args(structs),
                partial_restore=partial,
            ),
        )


def _like(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _plain(value: jax.Array) -> jax.Array:
    """What Orbax can save: the words of a key, and arrays that all processes know of."""
    array = jax.random.key_data(value) if _is_key(value) else value
    if jax.process_count() == 1 or not array.is_fully_addressable:
        return array
    # Process 0's, as whole arrays of other libraries are: to the others it is the same array, or should be.
    from jax.experimental import multihost_utils

    everywhere = jax.sharding.Mesh(jax.devices(), ("everywhere",))
    value_of_first = multihost_utils.broadcast_one_to_all(array)
    return multihost_utils.host_local_array_to_global_array(  # type: ignore[no-any-return]
        value_of_first, everywhere, jax.sharding.PartitionSpec()
    )


def _struct(leaf: Wanted) -> jax.ShapeDtypeStruct:
    sharding = None if leaf.template is ANYTHING else leaf.template.sharding
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    if "key" not in leaf.node:
        return jax.ShapeDtypeStruct(tuple(leaf.node["shape"]), leaf.node["dtype"], sharding=sharding)
    # The words of a key lie where the key does.
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=leaf.node["key"])))
    return jax.ShapeDtypeStruct((*leaf.node["shape"], *words.shape), words.dtype, sharding=sharding)


def _finished(leaf: Wanted, array: jax.Array) -> jax.Array:
    if isinstance(leaf.template, jax.Array) and not leaf.template.committed:
        # A scalar or a key that was on no device in particular has to go along with sharded arrays, as it did before.
        array = jax.numpy.asarray(jax.device_get(array))
    return jax.random.wrap_key_data(array, impl=leaf.node["key"]) if "key" in leaf.node else array


def _is_key(value: Any) -> bool:
    return bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


def _implementation(value: jax.Array) -> str:
    return str(jax.random.key_impl(value))
