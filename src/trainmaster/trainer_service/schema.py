"""The protobuf messages of the wire, built when this module is imported: no generated code and no compiler."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from trainmaster.engine.types import EngineError

# Arrays as the wire has them: bytes or lists of numbers, dense or in sparse rows.

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
    if len(data) % dtype.itemsize:
        raise EngineError(f"{where}: {len(data)} bytes are no whole number of {dtype} values")
    return np.frombuffer(data, dtype)


def array_of_numbers(values: object, dtype: np.dtype[Any], where: str) -> np.ndarray:
    """A list from JSON. Raises EngineError where it is not flat, or holds what does not fit the type."""
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
    """Without a shape the values stay flat. Raises EngineError where they do not fill it."""
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
    text = _SHORT.repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def number(fields: Mapping[str, Any], name: str, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise EngineError(f"{name} must be a finite number, not {shown(value)}")
    return float(value)


def whole(fields: Mapping[str, Any], name: str, default: Any, *, low: int = -(2**63), high: int = 2**64 - 1) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if not is_integer(value):
        raise EngineError(f"{name} must be a whole number, not {shown(value)}")
    if not low <= value <= high:
        raise EngineError(f"{name} must be from {low} to {high}, not {shown(value)}")
    return value


def is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


_PACKAGE = "tinker_public"
"""The name that the public clients use; it is no part of the bytes."""

_Field = descriptor_pb2.FieldDescriptorProto
_KINDS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
}

_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "repeated Datum"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "map double"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "map LossConfigValue"),
    },
    "LossConfigValue": {"number": (1, "oneof double"), "text": (2, "oneof string")},
    "Datum": {"model_input": (1, "repeated Chunk"), "loss_fn_inputs": (2, "map Tensor")},
    "Chunk": {
        "encoded_text": (1, "oneof EncodedTextChunk"),
        "image": (2, "oneof ImageChunk"),
        "dmel": (3, "oneof DmelChunk"),
    },
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "ImageChunk": {"data": (1, "bytes"), "format": (2, "string")},
    "DmelChunk": {"dmel": (1, "bytes")},
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "Tensor": {
        "dense": (1, "oneof bytes"),
        "sparse_csr": (2, "oneof SparseCsr"),
        "dtype": (3, "int32"),
        "shape": (4, "repeated int64"),
    },
    "BatchedTensor": {
        "data": (1, "bytes"),
        "offsets": (2, "bytes"),
        "dtype": (3, "int32"),
        "trailing_shape": (4, "repeated int64"),
    },
    "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "map BatchedTensor"), "num_datums": (3, "int64")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "repeated ArrayRecord"),
        "metrics": (3, "map double"),
    },
    "TopkLogprobs": {"token_ids": (1, "bytes"), "logprobs": (2, "bytes"), "k": (3, "uint32"), "length": (4, "uint32")},
    "SampledSequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "optional bytes"),
        "topk_sampled_logprobs": (4, "TopkLogprobs"),
    },
    "SampleResponse": {
        "sequences": (1, "repeated SampledSequence"),
        "prompt_logprobs": (2, "optional bytes"),
        "topk_prompt_logprobs": (3, "TopkLogprobs"),
        "prompt_cache_hit_tokens": (4, "int32"),
        "target_prompt_logprobs": (5, "Tensor"),
    },
}
"""Message -> field -> number and kind. An enum is an int32 here, which has the same bytes."""

_ONEOF = {"LossConfigValue": "value", "Chunk": "chunk", "Tensor": "encoding"}


def _add_field(owner: descriptor_pb2.DescriptorProto, name: str, number: int, kind: str) -> None:
    how, _, what = kind.rpartition(" ")
    field = owner.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if how == "map":
        entry = owner.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, "key", 1, "string")
        _add_field(entry, "value", 2, what)
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{owner.name}.{entry.name}"
    elif what in _KINDS:
        field.type = _KINDS[what]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{what}"
    if how in ("map", "repeated"):
        field.label = _Field.LABEL_REPEATED
    elif how == "oneof":
        if not owner.oneof_decl:
            owner.oneof_decl.add(name=_ONEOF[owner.name])
        field.oneof_index = 0
    elif how == "optional":
        field.proto3_optional = True
        field.oneof_index = len(owner.oneof_decl)
        owner.oneof_decl.add(name=f"_{name}")


def _build() -> dict[str, type[Message]]:
    file = descriptor_pb2.FileDescriptorProto(name="trainmaster/wire.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _add_field(message, field, number, kind)
    # A pool of its own: a process that also holds the public client has these names already.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES: dict[str, Any] = _build()

ForwardBackwardOutput = _CLASSES["ForwardBackwardOutput"]
ForwardBackwardRequest = _CLASSES["ForwardBackwardRequest"]
SampleResponse = _CLASSES["SampleResponse"]
