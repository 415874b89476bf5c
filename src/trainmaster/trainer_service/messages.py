"""What the front and the engine process say to each other: plain values, and bodies as the client sent them.

Front to engine: `Request`. Engine to front: `EngineReady` once, `Reply` for each request, `EngineStopped` last.

The operations of a `Request`, what `fields` and `body` hold, and what a `Reply` to it holds:

| op | in | reply |
|---|---|---|
| create_model | fields as the client sent them | fields: model_id; info (see `Reply`) |
| forward_backward, forward | body, untouched: `wire.decode_pass` | body: `wire.encode_pass_result` |
| optim_step, save_weights, load_weights, load_adapter, unload_model | fields as sent | fields, as the wire has them |
| leave_model | none: its client is gone | when what was not saved is, and it is freed. info: as of a save |
| save_weights_for_sampler | as sent; `sampling_session_id` where no path is | fields: path, or sampling_session_id |
| create_sampling_session | fields as sent, and `sampling_session_id` | fields: sampling_session_id |
| asample | fields: sampling_session_id; body: `wire.decode_sample` | body: `wire.encode_sample_result` |
| cancel | fields: request_id, of the sample that nobody waits for | none: the sample itself is answered |
| end_session | fields: session_id, model_ids, sampling_session_ids: to be freed, behind what was asked | none |

A `leave_model` that fails has left its model as it was, and is to be sent again.

Requests of one model come in the order of their `seq_id`, without gaps; they are to be done in that order, each once.
"""

from __future__ import annotations

import mmap
import os
import resource
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TRAINING_OPS = frozenset(
    {
        "forward",
        "forward_backward",
        "load_adapter",
        "load_weights",
        "optim_step",
        "save_weights",
        "save_weights_external",
        "save_weights_for_sampler",
    }
)
"""What has a place in the order of its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    request_id: str
    op: str
    model_id: str = ""
    seq_id: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The JSON body, where it is small."""
    body: bytes | memoryview | None = None
    """The body as it came, where it may be large."""
    content_type: str = "application/json"
    """Of `body`: `application/json` or `application/x-protobuf`."""
    encoding: str = ""
    """Of `body`: empty, or `zstd`."""
    door: str = "fireworks"
    """`tinker` or `fireworks`: how paths are written."""
    source: str = ""
    """The directory of the committed checkpoint that the request's path means, where the server said it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    request_id: str
    fields: Mapping[str, Any] | None = None
    """The result as the client shall read it."""
    body: bytes | memoryview | None = None
    error: str = ""
    """What went wrong, and what to do instead; empty: nothing."""
    category: str = "server"
    """Whose fault `error` is: `user` or `server`."""
    info: Mapping[str, Any] | None = None
    """For the front alone. Of a model that was made: `base_model`, `tokenizer_id`, `is_lora`, `lora_rank`.
    Of weights that were saved: see `EngineReady.checkpoints`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The first message of the engine: it takes requests."""

    capabilities: Mapping[str, Any]
    """`supported_models`, as get_server_capabilities answers them."""
    checkpoints: tuple[Mapping[str, Any], ...] = ()
    """What earlier attempts saved, oldest first: `path` as the client knows it, `kind` (`training` or `sampler`),
    `model_id`, `door`, `base_model`, `is_lora`, `lora_rank`, `train_unembed`, `train_mlp`, `train_attn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStopped:
    """The engine ends in order, and does nothing of what waits."""

    reason: str
    checkpoints: tuple[Mapping[str, Any], ...] = ()
    """What it saved of its models before, as in `EngineReady`."""


Message = Request | Reply | EngineReady | EngineStopped


INLINE_BYTES = 65_536
"""Up to here a body is copied; above, it is shared."""


class SharedBody:
    """A body too large to copy: an unnamed file that is written once, then mapped here or where its descriptor goes."""

    def __init__(self, *, on_disk: bool = False) -> None:
        if on_disk:
            with tempfile.TemporaryFile(prefix="trainmaster-body-", buffering=0) as file:
                self.fd = os.dup(file.fileno())
        else:
            self.fd = os.memfd_create("trainmaster-body", os.MFD_CLOEXEC)
        self.size = 0

    @classmethod
    def of(cls, data: bytes | memoryview) -> SharedBody:
        body = cls()
        try:
            body.write(data)
        except BaseException:
            body.close()
            raise
        return body

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self.fd, view)
            self.size += written
            view = view[written:]

    def read(self, offset: int, count: int) -> bytes:
        return os.pread(self.fd, count, offset)

    def map(self) -> memoryview:
        """The bytes stay mapped as long as somebody holds the view."""
        return mapped(self.fd, self.size)

    def close(self) -> None:
        """Views stay."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def mapped(fd: int, size: int) -> memoryview:
    """The first `size` bytes of a file, read-only, with a descriptor of their own."""
    return memoryview(mmap.mmap(fd, size, prot=mmap.PROT_READ)) if size else memoryview(b"")


def allow_many_descriptors() -> int:
    """Raise the limit of descriptors as far as allowed; what it is then. Each large body takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
