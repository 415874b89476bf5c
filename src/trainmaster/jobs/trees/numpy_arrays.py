"""NumPy arrays and scalars as leaves. Imported when a tree holds one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy

from trainmaster.jobs.trees.safetensors import Entry, Memory, Sink
from trainmaster.jobs.trees.structure import Described

KIND = "numpy"

_FORMAT = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""What the file format has a word for. All other types are stored as bytes; tree.json knows what they are."""


def describe(value: Any) -> Described | None:
    """What this is, if it is an array or a scalar of NumPy.

    Raises:
        TypeError: its elements are Python objects or records.
    """
    if not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    if value.dtype.hasobject or value.dtype.names is not None:
        raise TypeError(f"an array of {value.dtype}")
    scalar = {"scalar": True} if isinstance(value, numpy.generic) else {}
    identity = None if scalar else ("numpy", id(value))
    return Described(kind=KIND, dtype=_spell(value.dtype), shape=value.shape, identity=identity, extra=scalar)


def entry(name: str, value: Any) -> Entry:
    """How it lies in a file."""
    array = numpy.asarray(value)
    word = _FORMAT.get(_spell(array.dtype))
    if word is None:
        return Entry(name=name, dtype="U8", shape=(array.nbytes,), nbytes=array.nbytes)
    return Entry(name=name, dtype=word, shape=array.shape, nbytes=array.nbytes)


def on_gpu(value: Any) -> bool:  # noqa: ARG001 - alike for all libraries
    """Never."""
    return False


def itemsize(value: Any) -> int:
    """Bytes of one element."""
    return int(value.dtype.itemsize)


def fill(value: Any, view: memoryview) -> None:
    """Copy the elements to where they shall lie."""
    array = numpy.asarray(value)
    target = numpy.frombuffer(view, dtype=numpy.uint8).view(array.dtype).reshape(array.shape)
    numpy.copyto(target, array)


def allocate(node: Mapping[str, Any], template: Any, ferry: Any) -> tuple[Any, Sink]:  # noqa: ARG001 - alike
    """A new array, and what takes its bytes."""
    array = numpy.empty(tuple(node["shape"]), _parse(node["dtype"]))
    return array, Memory(memoryview(array.reshape(-1).view(numpy.uint8)) if array.nbytes else memoryview(b""))


def finish(node: Mapping[str, Any], template: Any, array: Any) -> Any:  # noqa: ARG001 - alike for all libraries
    """The leaf itself."""
    return array[()] if node.get("scalar") else array


def _spell(dtype: numpy.dtype[Any]) -> str:
    """The name of a type in this machine's byte order; the full notation of all others."""
    plain = dtype.isnative and dtype.kind not in "SUMm"
    return dtype.name if plain else dtype.str


def _parse(name: str) -> numpy.dtype[Any]:
    try:
        return numpy.dtype(name)
    except TypeError:
        import ml_dtypes  # bfloat16 and its like

        return numpy.dtype(getattr(ml_dtypes, name))
