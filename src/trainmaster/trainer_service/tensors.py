"""Arrays as the wire has them: bytes or lists of numbers, dense or in sparse rows."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np

from trainmaster.engine.types import EngineError

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
DTYPES: dict[int, np.dtype[Any]] = {
    FLOAT32: np.dtype("<f4"),
    INT64: np.dtype("<i8"),
    INT32: np.dtype("<i4"),
    BFLOAT16: np.dtype("<u2"),
}
"""The wire's numbers for types; NumPy has no bfloat16, so that it is read as what it lies in."""
JSON_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype(np.float32), "int64": np.dtype(np.int64)}

_DENSE_VALUES = 1 << 28
"""What sparse rows may grow to: their shape is only a claim of whoever sent it."""


_SHOWN = 60
_SHORT = reprlib.Repr()
"""Goes neither deep nor on and on, whatever it is given."""
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = _SHOWN


def array_of_bytes(data: bytes, dtype: np.dtype[Any], where: str) -> np.ndarray:
    """Values that lie side by side.

    Raises:
        EngineError: they do not fill the bytes.
    """
    if len(data) % dtype.itemsize:
        raise EngineError(f"{where}: {len(data)} bytes are no whole number of {dtype} values")
    return np.frombuffer(data, dtype)


def array_of_numbers(values: object, dtype: np.dtype[Any], where: str) -> np.ndarray:
    """A flat list that JSON had.

    Raises:
        EngineError: it is not one, or holds what does not fit the type.
    """
    if not isinstance(values, list):
        raise EngineError(f"{where} must be a list of numbers, not {shown(values)}")
    try:
        array = np.array(values, dtype=None if values else dtype)
    except ValueError as error:
        raise EngineError(f"{where} must be a flat list of numbers: {error}") from error
    if array.ndim != 1 or array.dtype.kind not in "if" or (dtype.kind == "i" and array.dtype.kind == "f"):
        raise EngineError(f"{where} must be a flat list of {dtype} numbers, not {shown(values)}")
    return array.astype(dtype)


def shaped(values: np.ndarray, shape: list[int], where: str) -> np.ndarray:
    """The values in a shape; in none, they stay flat.

    Raises:
        EngineError: they do not fill it.
    """
    if not shape:
        return values
    try:
        if min(shape) >= 0:
            return values.reshape(shape)
    except ValueError:
        pass
    raise EngineError(f"{where}: {values.size} values do not have the shape {shape}")


def dense_of_rows(
    values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: list[int], where: str
) -> np.ndarray:
    """What sparse rows mean, with zeros between.

    Raises:
        EngineError: the indices contradict each other or the shape.
    """
    if len(shape) != 2 or rows.size != shape[0] + 1 or columns.size != values.size:
        raise EngineError(f"{where}: the sparse indices do not fit the shape {shape}")
    counts = np.diff(rows)
    if rows[0] != 0 or rows[-1] != values.size or (counts < 0).any():
        raise EngineError(f"{where}: the sparse row indices do not rise from 0 to the number of values")
    if columns.size and not (columns.min() >= 0 and columns.max() < shape[1]):
        raise EngineError(f"{where}: a sparse column index is outside the shape {shape}")
    if shape[0] * shape[1] > _DENSE_VALUES or shape[1] < 0:
        raise EngineError(f"{where}: the shape {shape} is too large")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def shown(value: object) -> str:
    """A value as a message can quote it."""
    text = _SHORT.repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
