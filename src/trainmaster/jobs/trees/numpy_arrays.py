"""NumPy arrays and scalars as leaves. Imported when a tree holds one."""

from __future__ import annotations

from typing import Any

import numpy

from trainmaster.jobs.trees.safetensors import Memory, Sink, TensorEntry
from trainmaster.jobs.trees.structure import Described, Node


def describe(value: object) -> Described | None:
    """Describe an array or a scalar of NumPy; None for all else. TypeError: its elements are objects or records."""
    if not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    if value.dtype.hasobject or value.dtype.names is not None:
        raise TypeError(f"an array of {value.dtype}")
    scalar = {"scalar": True} if isinstance(value, numpy.generic) else {}
    identity = None if scalar else ("numpy", id(value))
    return Described(kind="numpy", dtype=_spell(value.dtype), shape=value.shape, identity=identity, extra=scalar)


def entry(name: str, value: Any) -> TensorEntry:
    return TensorEntry.of(name, _spell(value.dtype), value.shape, value.nbytes)


def on_gpu(_value: object) -> bool:
    return False


def itemsize(value: Any) -> int:
    return int(value.dtype.itemsize)


def fill(value: Any, view: memoryview) -> None:
    array = numpy.asarray(value)
    numpy.copyto(numpy.frombuffer(view, dtype=numpy.uint8).view(array.dtype).reshape(array.shape), array)


def allocate(node: Node, _template: object, _copier: object) -> tuple[numpy.ndarray[Any, Any], Sink]:
    array = numpy.empty(tuple(node["shape"]), _parse(node["dtype"]))
    return array, Memory(array.reshape(-1).view(numpy.uint8).data if array.nbytes else memoryview(b""))


def finish(node: Node, _template: object, array: Any) -> Any:
    return array[()] if node.get("scalar") else array


def _spell(dtype: numpy.dtype[Any]) -> str:
    return dtype.name if dtype.isnative and dtype.kind not in "SUMm" else dtype.str


def _parse(name: str) -> numpy.dtype[Any]:
    try:
        return numpy.dtype(name)
    except TypeError:
        import ml_dtypes  # bfloat16 and its like

        found: numpy.dtype[Any] = numpy.dtype(getattr(ml_dtypes, name))
        return found
