"""What the server's doors and a trainer service agree on: headers, ids, paths of saved weights, and whose a body is.

An id says where it belongs: those of futures and of sampling sessions name the job and the attempt of their trainer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

# Headers that only the server may set: it removes them from the requests of clients.

HEADER_PREFIX = "x-trainmaster-"
DOOR_HEADER = "x-trainmaster-door"
"""The door that a request came through, `tinker` or `fireworks`."""
SOURCE_HEADER = "x-trainmaster-source"
"""The place of the checkpoint that a request names, in UTF-8."""
REFUSAL_HEADER = "x-trainmaster-refusal"
"""Why a request must fail, percent-encoded. The trainer fails it: a failed request uses up its `seq_id`, too."""

TINKER = "tinker"
FIREWORKS = "fireworks"

SERVICE_FILE = "service.json"
"""The configuration of a trainer service, among the inputs of its launch."""
PRECISIONS = ("auto", "float32", "bfloat16", "fp8")
"""Of the base model's weights; `auto`: bfloat16 on a GPU, float32 on the CPU. `fp8`: linear layers have 8 bits."""


class ModelMode(StrEnum):
    """What the models of a trainer service may do."""

    LORA = "lora"
    FULL = "full"
    FORWARD_ONLY = "forward_only"


# Ids

_FUTURE = re.compile(r"(job-[0-9a-z]{1,64}):(\d{1,9}):.+", re.DOTALL)
_SAMPLING_SESSION = re.compile(r".+:sample:.+@(job-[0-9a-z]{1,64})\.(\d{1,9})", re.DOTALL)
_LONGEST_SAMPLING_SESSION_ID = 1024
"""Ten times the length of ours; matching a long id could take quadratic time."""


class Trainer(NamedTuple):
    """One attempt of a trainer job. Ids of another attempt are dead in this one."""

    job_id: str
    attempt: int

    def future_id(self, owner: str, part: str | int) -> str:
        """The future of a request to `owner`, a model or a sampling session; `part` tells its requests apart."""
        return f"{self.job_id}:{self.attempt}:{owner}:{part}"

    def sampling_session_id(self, session_id: str, number: int) -> str:
        return f"{session_id}:sample:{number}@{self.job_id}.{self.attempt}"

    def made_future(self, future_id: str) -> bool:
        return future_id.startswith(f"{self.job_id}:{self.attempt}:")

    def made_sampling_session(self, sampling_session_id: str) -> bool:
        return sampling_session_id.endswith(f"@{self.job_id}.{self.attempt}")


def model_id_of(session_id: str, number: int) -> str:
    """The id of a session's model; some versions of the public client derive it in the same way."""
    return f"{session_id}:train:{number}"


def is_model_id(text: str) -> bool:
    return ":train:" in text


def trainer_of_future(future_id: str) -> Trainer | None:
    found = _FUTURE.fullmatch(future_id)
    return Trainer(found[1], int(found[2])) if found else None


def owner_of_future(future_id: str) -> str:
    """The model or the sampling session of a trainer's future; empty when it is no trainer's."""
    parts = future_id.split(":", 2)
    return parts[2].rpartition(":")[0] if len(parts) == 3 and parts[1].isdigit() else ""


def trainer_of_sampling_session(sampling_session_id: str) -> Trainer | None:
    if len(sampling_session_id) > _LONGEST_SAMPLING_SESSION_ID:
        return None
    found = _SAMPLING_SESSION.fullmatch(sampling_session_id)
    return Trainer(found[1], int(found[2])) if found else None


# Paths of saved weights

_PART = "([^/\0\ud800-\udfff]{1,256})"
"""Neither NUL nor surrogates, which databases refuse."""
_PATH = re.compile(f"tinker://{_PART}/(weights|sampler_weights|external_weights)/{_PART}")
KIND_OF_PLACE: Mapping[str, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
PLACE_OF_KIND: Mapping[str, str] = {kind: place for place, kind in KIND_OF_PLACE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPath:
    """`tinker://<run>/<place>/<name>`: how Tinker clients name saved weights."""

    run: str
    place: str
    """`weights`, `sampler_weights` or `external_weights`."""
    name: str

    @staticmethod
    def parse(text: str) -> WeightsPath | None:
        found = _PATH.fullmatch(text)
        return WeightsPath(run=found[1], place=found[2], name=found[3]) if found else None

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.place}/{self.name}"

    @property
    def kind(self) -> str:
        return KIND_OF_PLACE[self.place]


# Routing a body. A forward_backward may have a hundred megabytes; door and trainer look only at its ends.

JSON = "application/json"
PROTOBUF = "application/x-protobuf"
DECODED_BYTES = 64 << 10
"""JSON of up to this length is decoded whole."""
END_BYTES = 4096
"""How much of either end of a longer one is searched; the public clients need a few hundred bytes."""
_MAX_PROTOBUF_FIELDS = 4096
"""How many top-level protobuf fields are skipped in search of those that clients write first."""

Read = Callable[[int, int], bytes]
"""Bytes of a body, by offset and count; fewer at its end."""

_VALUE = rb'"[^"\\]*"|-?[0-9][0-9.eE+-]*|true|false|null'
_MEMBER = re.compile(rb'"([^"\\]*)"\s*:\s*(' + _VALUE + rb")\s*")
_MEMBERS = rb'\s*"[^"\\]*"\s*:\s*(?:' + _VALUE + rb")\s*"
_HEAD = re.compile(rb"\s*\{(?:" + _MEMBERS + rb",)+")
_TAIL = re.compile(rb"(?:," + _MEMBERS + rb")+\}\s*\Z")


class PeekError(ValueError):
    """The body does not say whose it is."""


def content_type_of(header: str) -> str:
    """`PROTOBUF` or `JSON`, by a Content-Type header; JSON where it says something else."""
    given = header.partition(";")[0].strip().lower()
    return PROTOBUF if given in (PROTOBUF, "application/protobuf") else JSON


def peek_json(read: Read, size: int) -> dict[str, Any]:
    """The members of a JSON object: all of a small one (PeekError if it is none), else the plain ones at its two ends.

    Both ends of an object lie outside of strings. So members that reach an end without a gap, and have no escapes, are
    the object's own and not those of a nested one.
    """
    if size <= DECODED_BYTES:
        try:
            whole = json.loads(read(0, size))
        except (ValueError, RecursionError) as error:
            raise PeekError(f"the body is not JSON: {error}") from error
        if not isinstance(whole, dict):
            raise PeekError("the body is no JSON object")
        return whole
    tail = _TAIL.search(read(size - END_BYTES, END_BYTES))
    return {**peek_json_head(read(0, END_BYTES)), **(_members(tail.group()) if tail else {})}


def peek_json_head(head: bytes) -> dict[str, Any]:
    """The plain members at the beginning of a JSON object of which no more is there yet."""
    found = _HEAD.match(head[:END_BYTES])
    return _members(found.group()) if found else {}


def _members(text: bytes) -> dict[str, Any]:
    return {name.decode("utf-8", "replace"): _plain(value) for name, value in _MEMBER.findall(text)}


def _plain(value: bytes) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return None


def peek_protobuf(read: Read, size: int, wanted: Collection[str] = ("model_id", "seq_id")) -> dict[str, Any]:
    """The `model_id` and `seq_id` of a ForwardBackwardRequest, read no further than until all `wanted` are found.

    Raises PeekError if it is no such message, or is cut before its `model_id` ends.
    """
    found: dict[str, Any] = {}
    position = 0
    for _ in range(_MAX_PROTOBUF_FIELDS):
        if position >= size or found.keys() >= set(wanted):
            break
        window = read(position, 24)
        tag, at = _varint(window, 0)
        field, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(window, at)
            if field == 2:
                found["seq_id"] = value
            position += at
        elif kind == 2:
            length, at = _varint(window, at)
            position += at
            if field == 1:
                found["model_id"] = _text(read(position, min(length, END_BYTES + 1)), length)
            position += length
        elif kind in (1, 5):
            position += at + (8 if kind == 1 else 4)
        else:
            raise PeekError("the body is no protobuf message")
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    raise PeekError("the body is no protobuf message")


def _text(data: bytes, length: int) -> str:
    if len(data) != length:
        raise PeekError(f"model_id is cut, or longer than {END_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise PeekError(f"model_id is no text: {error}") from error
