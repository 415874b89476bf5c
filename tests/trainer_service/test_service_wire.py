"""Bodies of the public clients: decoded, encoded, and refused with the place that is wrong."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import zstandard

from trainmaster.engine.types import (
    EngineError,
    PassResult,
    SampledSequence,
    SampleResult,
    StopReason,
)
from trainmaster.trainer_service import schema, wire

REQUEST = bytes.fromhex(
    "0a09733a747261696e3a3010011a640a100a0e0a0c01000000020000000300000012300a0d7461726765745f746f6b656e73121f0a18020000"
    "0000000000030000000000000004000000000000001802220103121e0a077765696768747312130a0c000000000000803f0000803f18012201"
    "03220d63726f73735f656e74726f7079"
)
"""Model `s:train:0`, seq 1; tokens 1, 2, 3; targets 2, 3, 4; weights 0, 1, 1: as the public client writes it."""
OUTPUT = bytes.fromhex(
    "0a0b41727261795265636f7264123f0a0b41727261795265636f7264122e0a086c6f6770726f627312220a0c000080bf000000c0000040c012"
    "1000000000000000000c00000000000000180118011a130a086c6f73733a73756d110000000000001440"
)
SAMPLE = bytes.fromhex("0a160801120805000000060000001a08000000bf000080be12080000c07f000080bf")

DATUM = {
    "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
        "weights": {"data": [0, 1, 1], "dtype": "float32"},
    },
}


def json_body(datum: Any = DATUM, name: str = "forward_backward_input", **given: Any) -> bytes:
    told = {"data": [datum], "loss_fn": "cross_entropy", **given}
    return json.dumps({name: told, "model_id": "s:train:0", "seq_id": 1}).encode()


def request_with(tensor: dict[str, Any]) -> bytes:
    message = schema.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(2, dtype="<i4").tobytes()
    made = datum.loss_fn_inputs["target_tokens"]
    for name, value in tensor.items():
        if name == "shape":
            made.shape.extend(value)
        elif name == "sparse_csr":
            for part, data in value.items():
                setattr(made.sparse_csr, part, data)
        else:
            setattr(made, name, value)
    return bytes(message.SerializeToString())


def test_known_request_is_decoded() -> None:
    given = wire.decode_pass(REQUEST, wire.PROTOBUF)
    assert (given.model_id, given.loss, given.options, given.backward) == ("s:train:0", "cross_entropy", {}, True)
    (datum,) = given.data
    assert datum.tokens.dtype == np.int64
    assert datum.tokens.tolist() == [1, 2, 3]
    assert datum.inputs["target_tokens"].dtype == np.int64
    assert datum.inputs["target_tokens"].tolist() == [2, 3, 4]
    assert datum.inputs["weights"].dtype == np.float32
    assert datum.inputs["weights"].tolist() == [0, 1, 1]


def test_known_output_is_encoded_to_the_byte() -> None:
    result = PassResult(
        outputs=({"logprobs": np.array([-1, -2, -3], np.float32)},),
        metrics={"loss:sum": 5.0},
    )
    assert wire.encode_pass_result(result) == OUTPUT


def test_known_sample_is_encoded_to_the_byte() -> None:
    sequence = SampledSequence(
        tokens=np.array([5, 6], np.int32), logprobs=np.array([-0.5, -0.25], np.float32), stop_reason=StopReason.LENGTH
    )
    result = SampleResult(sequences=(sequence,), prompt_logprobs=np.array([np.nan, -1], np.float32))
    assert wire.encode_sample_result(result) == SAMPLE


@pytest.mark.parametrize("levels", [500, 900, 950, 970, 980, 990, 1000, 5000])
def test_values_that_go_deep_are_refused_in_a_few_words(levels: int) -> None:
    """From where they cannot be read at all to where they can be, but not be quoted whole."""
    deep = b"[" * levels + b"]" * levels
    for body in (json_body(DATUM, data="x").replace(b'"x"', deep), json_body("x").replace(b'"x"', deep)):
        with pytest.raises(EngineError) as caught:
            wire.decode_pass(body, "application/json")
        assert len(str(caught.value)) < 200
    with pytest.raises(EngineError) as caught:
        wire.decode_sample("r", b'{"sampling_params": ' + deep + b"}")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["forward_backward_input", "forward_input"])
def test_json_request_means_the_same_as_protobuf(name: str) -> None:
    ours, theirs = wire.decode_pass(json_body(name=name), "application/json"), wire.decode_pass(REQUEST, wire.PROTOBUF)
    assert ours.backward is (name == "forward_backward_input")
    assert (ours.model_id, ours.loss) == (theirs.model_id, theirs.loss)
    assert np.array_equal(ours.data[0].tokens, theirs.data[0].tokens)
    for key, value in theirs.data[0].inputs.items():
        assert ours.data[0].inputs[key].dtype == value.dtype
        assert np.array_equal(ours.data[0].inputs[key], value)


def test_forward_only_has_no_backward_pass() -> None:
    message = schema.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy", forward_only=True)
    assert wire.decode_pass(message.SerializeToString(), wire.PROTOBUF).backward is False


def test_options_prefer_the_second_map_which_has_text() -> None:
    message = schema.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    message.loss_fn_config["beta"] = 1.0
    message.loss_fn_config["old"] = 3.0
    message.loss_fn_config_v2["beta"].number = 2.0
    message.loss_fn_config_v2["kind"].text = "x"
    assert wire.decode_pass(message.SerializeToString(), wire.PROTOBUF).options == {
        "beta": 2.0,
        "old": 3.0,
        "kind": "x",
    }


def test_chunks_of_tokens_are_one_sequence() -> None:
    datum = {**DATUM, "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1]}, {"tokens": [2, 3]}]}}
    assert wire.decode_pass(json_body(datum), "application/json").data[0].tokens.tolist() == [1, 2, 3]


def test_compressed_body_is_decompressed() -> None:
    packed = zstandard.ZstdCompressor().compress(REQUEST)
    assert wire.decode_pass(memoryview(packed), wire.PROTOBUF, "zstd").model_id == "s:train:0"


def test_body_that_grows_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 1 << 20)
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    with pytest.raises(EngineError, match="larger than 1048576 bytes"):
        wire.decode_pass(bomb, wire.PROTOBUF, "zstd")


def test_bfloat16_and_int32_are_widened() -> None:
    values = np.array([1.5, -2.0], np.float32)
    bits = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    widened = wire.decode_pass(request_with({"dense": bits, "dtype": 4}), wire.PROTOBUF).data[0]
    assert widened.inputs["target_tokens"].dtype == np.float32
    assert widened.inputs["target_tokens"].tolist() == [1.5, -2.0]
    whole = request_with({"dense": np.array([7, -1], "<i4").tobytes(), "dtype": 3})
    assert wire.decode_pass(whole, wire.PROTOBUF).data[0].inputs["target_tokens"].dtype == np.int64


SPARSE = {
    "values": np.array([5, 6, 7], "<i8"),
    "crow_indices": np.array([0, 2, 2, 3], "<i8"),
    "col_indices": np.array([0, 3, 1], "<i8"),
}
DENSE = [[5, 0, 0, 6], [0, 0, 0, 0], [0, 7, 0, 0]]


def test_sparse_rows_are_filled_with_zeros() -> None:
    sparse = {name: array.tobytes() for name, array in SPARSE.items()}
    body = request_with({"sparse_csr": sparse, "dtype": 2, "shape": [3, 4]})
    assert wire.decode_pass(body, wire.PROTOBUF).data[0].inputs["target_tokens"].tolist() == DENSE
    tensor = {
        "data": [5, 6, 7],
        "dtype": "int64",
        "shape": [3, 4],
        "sparse_crow_indices": [0, 2, 2, 3],
        "sparse_col_indices": [0, 3, 1],
    }
    datum = {**DATUM, "loss_fn_inputs": {"target_tokens": tensor}}
    assert wire.decode_pass(json_body(datum), "application/json").data[0].inputs["target_tokens"].tolist() == DENSE


@pytest.mark.parametrize(
    ("changed", "shape"),
    [
        ({"crow_indices": [0, 2, 3]}, [3, 4]),
        ({"crow_indices": [0, 3, 2, 3]}, [3, 4]),
        ({"crow_indices": [1, 2, 2, 3]}, [3, 4]),
        ({"col_indices": [0, 4, 1]}, [3, 4]),
        ({"col_indices": [0, -1, 1]}, [3, 4]),
        ({"col_indices": [0, 1]}, [3, 4]),
        ({}, [3]),
        ({}, [3, 1 << 40]),
    ],
)
def test_sparse_rows_that_contradict_themselves_are_refused(changed: dict[str, list[int]], shape: list[int]) -> None:
    sparse = {name: np.array(changed.get(name, array), "<i8").tobytes() for name, array in SPARSE.items()}
    with pytest.raises(EngineError, match=r"data\[0\]\.loss_fn_inputs\['target_tokens'\]"):
        wire.decode_pass(request_with({"sparse_csr": sparse, "dtype": 2, "shape": shape}), wire.PROTOBUF)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"dense": b"123", "dtype": 1}, "no whole number"),
        ({"dense": b"1234", "dtype": 9}, "dtype 9 is not known"),
        ({"dense": b"12345678", "dtype": 1, "shape": [3]}, r"do not have the shape \[3\]"),
        ({"dense": b"12345678", "dtype": 1, "shape": [-1, 2]}, r"do not have the shape \[-1, 2\]"),
    ],
)
def test_tensor_that_is_wrong_is_refused(tensor: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        wire.decode_pass(request_with(tensor), wire.PROTOBUF)


def test_image_is_refused_by_its_place() -> None:
    message = schema.ForwardBackwardRequest(model_id="m", seq_id=1)
    message.data.add().model_input.add().image.data = b"png"
    with pytest.raises(EngineError, match=r"data\[0\]\.model_input: only tokens .* not image"):
        wire.decode_pass(message.SerializeToString(), wire.PROTOBUF)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "neither"),
        (json_body(DATUM, data={}), "must be a list"),
        (json_body(3), r"data\[0\] must be an object"),
        (json_body({"loss_fn_inputs": {}}), r"data\[0\]\.model_input must be an object"),
        (json_body({**DATUM, "model_input": {"chunks": [{"type": "dmel"}]}}), "only tokens are offered here, not dmel"),
        (json_body({**DATUM, "model_input": {"chunks": [{"tokens": [1.5]}]}}), "int64 numbers"),
        (json_body({**DATUM, "model_input": {"chunks": [{"tokens": [1 << 70]}]}}), "int64 numbers"),
        (json_body({**DATUM, "model_input": {"chunks": [{"tokens": [[1]]}]}}), "int64 numbers"),
        (json_body({**DATUM, "model_input": {"chunks": [{"tokens": ["1"]}]}}), "int64 numbers"),
        (json_body({**DATUM, "loss_fn_inputs": {"x": {"data": [1], "dtype": "int8"}}}), r"\['x'\] must have data"),
        (json_body({**DATUM, "loss_fn_inputs": {"x": {"data": [1], "dtype": []}}}), r"\['x'\] must have data"),
        (json_body({**DATUM, "loss_fn_inputs": {"x": {"data": [1], "dtype": {}}}}), r"\['x'\] must have data"),
        (json_body(DATUM, loss_fn_config={"beta": [1]}), "loss_fn_config"),
        (json_body(DATUM, loss_fn_config={"beta": 10**400}), "beta must be a number that fits 64 bits, not 1000"),
    ],
)
def test_json_that_is_wrong_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        wire.decode_pass(body, "application/json")


@pytest.mark.parametrize("body", [b"\xff\xff", REQUEST[:-5], b"{}"])
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    with pytest.raises(EngineError):
        wire.decode_pass(body, wire.PROTOBUF)


@pytest.mark.parametrize(("body", "encoding"), [(b"plain", "zstd"), (REQUEST, "gzip")])
def test_encoding_that_is_wrong_is_refused(body: bytes, encoding: str) -> None:
    with pytest.raises(EngineError, match=r"encoding|compressed"):
        wire.decode_pass(body, wire.PROTOBUF, encoding)


def test_results_of_different_shapes_keep_their_places() -> None:
    shapes: list[tuple[int, ...]] = [(3,), (2,), (2, 4), (5, 4), (0,)]
    outputs = [{"logprobs": np.random.default_rng(size).random(shape, np.float32)} for size, shape in enumerate(shapes)]
    body = wire.encode_pass_result(PassResult(outputs=tuple(outputs), metrics={"loss:sum": 1.0, "n:max": 2.0}))
    assert [record.num_datums for record in schema.ForwardBackwardOutput.FromString(body).loss_fn_outputs] == [2, 2, 1]
    answer = wire.pass_result_as_json(body)
    assert answer["metrics"] == {"loss:sum": 1.0, "n:max": 2.0}
    for given, told in zip(outputs, answer["loss_fn_outputs"], strict=True):
        tensor = told["logprobs"]
        assert tuple(tensor["shape"]) == given["logprobs"].shape
        assert tensor["dtype"] == "float32"
        assert np.array_equal(np.array(tensor["data"], np.float32), given["logprobs"].ravel())


def test_type_that_the_wire_lacks_is_a_mistake_of_ours() -> None:
    result = PassResult(outputs=({"logprobs": np.zeros(3, np.float64)},), metrics={})
    with pytest.raises(KeyError, match="float64"):
        wire.encode_pass_result(result)


def test_sample_as_json_has_what_protobuf_has() -> None:
    topk = (np.array([[0, 0], [4, 0]], np.int32), np.array([[-99999, -99999], [-0.5, -99999]], np.float32))
    sequence = SampledSequence(
        tokens=np.array([5, 6], np.int32),
        logprobs=np.array([-0.5, -0.25], np.float32),
        stop_reason=StopReason.STOP,
        topk=(np.array([[5, 1], [6, 2]], np.int32), np.array([[-0.5, -1], [-0.25, -2]], np.float32)),
    )
    result = SampleResult(
        sequences=(sequence,), prompt_logprobs=np.array([np.nan, -1], np.float32), topk_prompt_logprobs=topk
    )
    assert wire.sample_result_as_json(wire.encode_sample_result(result)) == {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": "stop",
                "tokens": [5, 6],
                "logprobs": [-0.5, -0.25],
                "topk_logprobs": [[(5, -0.5), (1, -1.0)], [(6, -0.25), (2, -2.0)]],
            }
        ],
        "prompt_logprobs": [None, -1.0],
        "topk_prompt_logprobs": [None, [(4, -0.5)]],
    }


def sample_body(**given: Any) -> bytes:
    params = given.pop("sampling_params", {"max_tokens": 5, "seed": 7, "temperature": 0.5, "top_k": -1, "top_p": 1.0})
    told = {
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [3, 10, 17], "type": "encoded_text"}]},
        "sampling_params": params,
        "sampling_session_id": "s:sample:0",
        "seq_id": 0,
        **given,
    }
    return json.dumps(told).encode()


def test_sample_request_is_decoded() -> None:
    given = wire.decode_sample("r", sample_body(prompt_logprobs=True, topk_prompt_logprobs=2))
    assert (given.request_id, given.prompt, given.num_samples) == ("r", (3, 10, 17), 2)
    assert (given.max_tokens, given.seed, given.temperature, given.top_k, given.top_p) == (5, 7, 0.5, -1, 1.0)
    assert (given.prompt_logprobs, given.topk_prompt_logprobs, given.topk_sample_logprobs) == (True, 2, 0)


@pytest.mark.parametrize(
    ("stop", "tokens", "strings"),
    [
        (None, None, ()),
        ([], (), ()),
        ("\n\nUser:", (), ("\n\nUser:",)),
        (["a", "b"], (), ("a", "b")),
        ([1, 2], (1, 2), ()),
    ],
)
def test_stops_are_told_apart(stop: Any, tokens: Any, strings: Any) -> None:
    given = wire.decode_sample("r", sample_body(sampling_params={"stop": stop}))
    assert (given.stop_tokens, given.stop_strings) == (tokens, strings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"stop": [1, "a"]}}, "stop"),
        ({"sampling_params": {"stop": 3}}, "stop"),
        ({"sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"sampling_params": {"temperature": 10**400}}, "temperature"),
        ({"sampling_params": {"max_tokens": 1.5}}, "max_tokens"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n is not supported"),
        ({"record_stability_info": True}, "record_stability_info is not supported"),
        ({"base_model": "m"}, "base_model is not supported"),
        ({"model_path": "tinker://r/sampler_weights/n"}, "model_path is not supported"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, "target_prompt_logprobs is not supported"),
    ],
)
def test_sample_that_is_wrong_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        wire.decode_sample("r", sample_body(**given))
