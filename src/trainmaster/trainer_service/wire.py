"""Bodies of the public clients (protobuf or JSON, maybe compressed) decoded for the engine, and its results encoded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from trainmaster.engine.types import Datum, EngineError, Pass, PassResult, SampleRequest, SampleResult, StopReason
from trainmaster.protocol.trainer_requests import PROTOBUF
from trainmaster.trainer_service import schema
from trainmaster.trainer_service.schema import BFLOAT16, DTYPES, INT32, INT64, JSON_DTYPES, number, shown, whole

MAX_BODY_BYTES = 2 << 30
"""What a compressed body may grow to; protobuf itself ends here."""

REFUSED_OF_SAMPLES = (
    "target_prompt_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
    "record_stability_info",
    "base_model",
    "model_path",
)
"""What clients may ask of a sample, and do not get here; what is sampled from belongs to the sampling session."""
_RECORD = "ArrayRecord"
_WIRE_DTYPES = {dtype: number for number, dtype in DTYPES.items() if number != BFLOAT16}


def decode_pass(body: bytes | memoryview, content_type: str, encoding: str = "") -> Pass:
    """A forward_backward or forward body. Raises EngineError, which says where it is wrong."""
    plain = decompressed(body, encoding)
    return _pass_from_protobuf(plain) if content_type == PROTOBUF else _pass_from_json(plain)


def decode_sample(request_id: str, body: bytes | memoryview, encoding: str = "") -> SampleRequest:
    fields = _json_object(decompressed(body, encoding))
    for name in REFUSED_OF_SAMPLES:
        if fields.get(name):
            raise EngineError(f"{name} is not supported: leave it out")
    params = fields.get("sampling_params")
    if not isinstance(params, dict):
        raise EngineError(f"sampling_params must be an object, not {shown(params)}")
    stop = params.get("stop")
    stops = [stop] if isinstance(stop, str) else stop
    if stops is not None and not (
        isinstance(stops, list) and (all(map(schema.is_integer, stops)) or all(isinstance(one, str) for one in stops))
    ):
        raise EngineError(
            f"sampling_params.stop must be a string, or a list of strings or of token ids, not {shown(stop)}"
        )
    strings = tuple(one for one in stops or () if isinstance(one, str))
    return SampleRequest(
        request_id=request_id,
        prompt=tuple(_tokens_from_json(fields.get("prompt"), "prompt").tolist()),
        num_samples=whole(fields, "num_samples", 1),
        max_tokens=whole(params, "max_tokens", None),
        seed=whole(params, "seed", None),
        temperature=number(params, "temperature", 1.0),
        top_k=whole(params, "top_k", -1),
        top_p=number(params, "top_p", 1.0),
        stop_tokens=None if stops is None else tuple(one for one in stops if not isinstance(one, str)),
        stop_strings=strings,
        prompt_logprobs=bool(fields.get("prompt_logprobs")),
        topk_prompt_logprobs=whole(fields, "topk_prompt_logprobs", 0),
        topk_sample_logprobs=whole(fields, "topk_sample_logprobs", 0),
    )


def encode_pass_result(result: PassResult) -> bytes:
    """Neighbours whose arrays have the same trailing shape and type share a record."""
    message = schema.ForwardBackwardOutput(loss_fn_output_type=_RECORD)
    for name, value in result.metrics.items():
        message.metrics[name] = value

    def layout_of(output: Mapping[str, np.ndarray]) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        return tuple((name, array.shape[1:], array.dtype.str) for name, array in output.items())

    for layout, group in groupby(result.outputs, key=layout_of):
        outputs = list(group)
        record = message.loss_fn_outputs.add(type_tag=_RECORD, num_datums=len(outputs))
        for name, trailing, dtype in layout:
            arrays = [np.ascontiguousarray(output[name]) for output in outputs]
            offsets = np.zeros(len(arrays) + 1, dtype="<i8")
            np.cumsum([array.nbytes for array in arrays], out=offsets[1:])
            tensor = record.fields[name]
            tensor.data = b"".join(array.tobytes() for array in arrays)
            tensor.offsets = offsets.tobytes()
            tensor.dtype = _WIRE_DTYPES[np.dtype(dtype)]
            tensor.trailing_shape.extend(trailing)
    return bytes(message.SerializeToString(deterministic=True))


def encode_sample_result(result: SampleResult) -> bytes:
    message = schema.SampleResponse()
    for sequence in result.sequences:
        added = message.sequences.add(
            stop_reason=0 if sequence.stop_reason is StopReason.STOP else 1,
            tokens=_packed(sequence.tokens, "<i4"),
            logprobs=_packed(sequence.logprobs, "<f4"),
        )
        _put_topk(added.topk_sampled_logprobs, sequence.topk)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = _packed(result.prompt_logprobs, "<f4")
    _put_topk(message.topk_prompt_logprobs, result.topk_prompt_logprobs)
    return bytes(message.SerializeToString(deterministic=True))


def pass_result_as_json(body: bytes | memoryview) -> dict[str, Any]:
    message = schema.ForwardBackwardOutput.FromString(bytes(body))
    outputs = []
    for record in message.loss_fn_outputs:
        datums: list[dict[str, Any]] = [{} for _ in range(record.num_datums)]
        for name, tensor in record.fields.items():
            values = np.frombuffer(tensor.data, DTYPES[tensor.dtype])
            bounds = np.frombuffer(tensor.offsets, "<i8") // values.itemsize
            for datum, start, end in zip(datums, bounds[:-1], bounds[1:], strict=True):
                array = values[start:end].reshape(-1, *tensor.trailing_shape)
                datum[name] = {"data": array.ravel().tolist(), "dtype": str(array.dtype), "shape": list(array.shape)}
        outputs.extend(datums)
    return {
        "loss_fn_output_type": message.loss_fn_output_type,
        "loss_fn_outputs": outputs,
        "metrics": dict(message.metrics),
    }


def sample_result_as_json(body: bytes | memoryview) -> dict[str, Any]:
    message = schema.SampleResponse.FromString(bytes(body))
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "length" if sequence.stop_reason else "stop",
                "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
                "logprobs": np.frombuffer(sequence.logprobs, "<f4").tolist(),
                **(
                    {"topk_logprobs": _topk_as_json(sequence.topk_sampled_logprobs)}
                    if sequence.HasField("topk_sampled_logprobs")
                    else {}
                ),
            }
            for sequence in message.sequences
        ],
    }
    if message.HasField("prompt_logprobs"):
        logprobs = np.frombuffer(message.prompt_logprobs, "<f4").tolist()
        answer["prompt_logprobs"] = [None if value != value else value for value in logprobs]
    if message.HasField("topk_prompt_logprobs"):
        answer["topk_prompt_logprobs"] = _topk_as_json(message.topk_prompt_logprobs)
    return answer


def decompressed(body: bytes | memoryview, encoding: str) -> bytes | memoryview:
    if not encoding or encoding == "identity":
        return body
    if encoding != "zstd":
        raise EngineError(f"a body may be compressed with zstd, not with {encoding!r}")
    pieces = []
    size = 0
    try:
        for piece in zstandard.ZstdDecompressor().read_to_iter(body):
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise EngineError(f"the body is larger than {MAX_BODY_BYTES} bytes once it is decompressed")
            pieces.append(piece)
    except zstandard.ZstdError as error:
        raise EngineError(f"the body is not what its encoding says: {error}") from error
    return b"".join(pieces)


def _pass_from_protobuf(body: bytes | memoryview) -> Pass:
    try:
        message = schema.ForwardBackwardRequest.FromString(bytes(body))
    except DecodeError as error:
        raise EngineError(f"the body is not a ForwardBackwardRequest: {error}") from error
    options: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        options[name] = value.text if value.WhichOneof("value") == "text" else value.number
    return Pass(
        model_id=message.model_id,
        data=tuple(_datum_from_protobuf(datum, f"data[{index}]") for index, datum in enumerate(message.data)),
        loss=message.loss_fn,
        options=options,
        backward=not message.forward_only,
    )


def _datum_from_protobuf(datum: Any, where: str) -> Datum:
    chunks = []
    for chunk in datum.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise EngineError(f"{where}.model_input: only tokens are offered here, not {kind or 'an empty chunk'}")
        chunks.append(schema.array_of_bytes(chunk.encoded_text.tokens, DTYPES[INT32], f"{where}.model_input"))
    tokens = np.concatenate(chunks) if chunks else np.zeros(0)
    inputs = {
        name: _tensor_from_protobuf(tensor, f"{where}.loss_fn_inputs[{name!r}]")
        for name, tensor in datum.loss_fn_inputs.items()
    }
    return Datum(tokens=tokens.astype(np.int64), inputs=inputs)


def _tensor_from_protobuf(tensor: Any, where: str) -> np.ndarray:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise EngineError(f"{where}: dtype {tensor.dtype} is not known")
    sparse = tensor.sparse_csr if tensor.WhichOneof("encoding") == "sparse_csr" else None
    values = schema.array_of_bytes(tensor.dense if sparse is None else sparse.values, dtype, where)
    if tensor.dtype == BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    elif tensor.dtype == INT32:
        values = values.astype(np.int64)
    if sparse is None:
        return schema.shaped(values, list(tensor.shape), where)
    rows = schema.array_of_bytes(sparse.crow_indices, DTYPES[INT64], where)
    columns = schema.array_of_bytes(sparse.col_indices, DTYPES[INT64], where)
    return schema.dense_of_rows(values, rows, columns, list(tensor.shape), where)


def _pass_from_json(body: bytes | memoryview) -> Pass:
    fields = _json_object(body)
    backward = "forward_backward_input" in fields
    name = "forward_backward_input" if backward else "forward_input"
    given = fields.get(name)
    if not isinstance(given, dict):
        raise EngineError("the body has neither a forward_backward_input nor a forward_input")
    data, options = given.get("data"), given.get("loss_fn_config") or {}
    if not isinstance(data, list):
        raise EngineError(f"{name}.data must be a list, not {shown(data)}")
    if not isinstance(options, dict) or not all(isinstance(value, str | int | float) for value in options.values()):
        raise EngineError(f"{name}.loss_fn_config must hold numbers and strings, not {shown(options)}")
    return Pass(
        model_id=str(fields.get("model_id")),
        data=tuple(_datum_from_json(datum, f"data[{index}]") for index, datum in enumerate(data)),
        loss=str(given.get("loss_fn")),
        options={key: value if isinstance(value, str) else _float(value, key) for key, value in options.items()},
        backward=backward,
    )


def _datum_from_json(datum: object, where: str) -> Datum:
    inputs = datum.get("loss_fn_inputs") if isinstance(datum, dict) else None
    if not isinstance(datum, dict) or not isinstance(inputs, dict):
        raise EngineError(f"{where} must be an object with a model_input and loss_fn_inputs, not {shown(datum)}")
    return Datum(
        tokens=_tokens_from_json(datum.get("model_input"), f"{where}.model_input"),
        inputs={name: _tensor_from_json(value, f"{where}.loss_fn_inputs[{name!r}]") for name, value in inputs.items()},
    )


def _tokens_from_json(value: object, where: str) -> np.ndarray:
    chunks = value.get("chunks") if isinstance(value, dict) else None
    if not isinstance(chunks, list):
        raise EngineError(f"{where} must be an object with chunks, not {shown(value)}")
    tokens = []
    for chunk in chunks:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else shown(chunk)
        if kind != "encoded_text":
            raise EngineError(f"{where}: only tokens are offered here, not {kind}")
        tokens.append(schema.array_of_numbers(chunk.get("tokens"), JSON_DTYPES["int64"], where))
    return np.concatenate(tokens) if tokens else np.zeros(0, np.int64)


def _tensor_from_json(value: object, where: str) -> np.ndarray:
    if not isinstance(value, dict) or value.get("dtype") not in list(JSON_DTYPES):  # it may be of any type
        raise EngineError(f"{where} must have data and a dtype of {' or '.join(JSON_DTYPES)}, not {shown(value)}")
    values = schema.array_of_numbers(value.get("data"), JSON_DTYPES[value["dtype"]], where)
    shape = value.get("shape")
    shape = [values.size] if shape is None else schema.array_of_numbers(shape, JSON_DTYPES["int64"], where).tolist()
    if (rows := value.get("sparse_crow_indices")) is None:
        return schema.shaped(values, shape, where)
    columns = schema.array_of_numbers(value.get("sparse_col_indices"), JSON_DTYPES["int64"], where)
    return schema.dense_of_rows(
        values, schema.array_of_numbers(rows, JSON_DTYPES["int64"], where), columns, shape, where
    )


def _json_object(body: bytes | memoryview) -> dict[str, Any]:
    try:
        fields = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise EngineError(f"the body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise EngineError(f"the body must be a JSON object, not {shown(fields)}")
    return fields


def _packed(values: np.ndarray, dtype: str) -> bytes:
    return np.ascontiguousarray(values, dtype=dtype).tobytes()


def _put_topk(message: Any, topk: tuple[np.ndarray, np.ndarray] | None) -> None:
    if topk is not None:
        ids, logprobs = topk
        message.token_ids, message.logprobs = _packed(ids, "<i4"), _packed(logprobs, "<f4")
        message.length, message.k = ids.shape


_MASKED = -99999.0
"""The logprob of a place in a top-k table that holds nothing."""


def _topk_as_json(topk: Any) -> list[list[tuple[int, float]] | None]:
    ids = np.frombuffer(topk.token_ids, "<i4").reshape(topk.length, topk.k).tolist()
    logprobs = np.frombuffer(topk.logprobs, "<f4").reshape(topk.length, topk.k).tolist()
    return [
        [pair for pair in zip(row, values, strict=True) if pair != (0, _MASKED)] or None
        for row, values in zip(ids, logprobs, strict=True)
    ]


def _float(value: float, name: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise EngineError(f"{name} must be a number that fits 64 bits, not {shown(value)}") from None
