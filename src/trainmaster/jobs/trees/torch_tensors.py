"""Tensors of PyTorch as leaves, whole or sharded (DTensor). Imported when a tree holds one."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainmaster.jobs.trees.buffers import Buffer
from trainmaster.jobs.trees.safetensors import PIECE, Entry, Memory, Sink
from trainmaster.jobs.trees.structure import ANYTHING, Described

KIND = "torch"
SHARDED = "torch-sharded"

_FORMAT = {
    torch.bool: "BOOL",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
"""What the file format has a word for. All other types are stored as bytes; tree.json knows what they are."""


def describe(value: Any) -> Described | None:
    """What this is, if it is a tensor.

    Raises:
        TypeError: it is of a kind whose bytes say too little.
    """
    if not isinstance(value, torch.Tensor):
        return None
    dtype = _spell(value.dtype)
    if is_sharded(value):
        return Described(kind=SHARDED, dtype=dtype, shape=tuple(value.shape), identity=("torch", id(value)))
    if is_traceable_wrapper_subclass(value) or type(value).__name__ == "ShardedTensor":
        raise TypeError(f"a {type(value).__name__}: unwrap it first")
    if value.layout != torch.strided or value.is_quantized:
        raise TypeError("a sparse or quantized tensor: make it dense first")
    return Described(kind=KIND, dtype=dtype, shape=tuple(value.shape), identity=_identity(value))


def is_sharded(value: Any) -> bool:
    """Whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def entry(name: str, value: torch.Tensor) -> Entry:
    """How it lies in a file.

    Raises:
        TypeError: it has no data.
    """
    if value.is_meta:
        raise TypeError("a meta tensor has no data")
    nbytes = value.numel() * value.element_size()
    word = _FORMAT.get(value.dtype)
    if word is None:
        return Entry(name=name, dtype="U8", shape=(nbytes,), nbytes=nbytes)
    return Entry(name=name, dtype=word, shape=tuple(value.shape), nbytes=nbytes)


def itemsize(value: torch.Tensor) -> int:
    """Bytes of one element."""
    return value.element_size()


def on_gpu(value: Any) -> bool:
    """Whether page-locked memory makes its copy faster."""
    return isinstance(value, torch.Tensor) and value.is_cuda


def fill(value: torch.Tensor, view: memoryview) -> None:
    """Copy the elements to where they shall lie. From a GPU the copy is only begun; `mark` tells when it is done."""
    if value.numel() == 0:
        return
    target = torch.frombuffer(view, dtype=torch.uint8).view(value.dtype).view(value.shape)
    target.copy_(value.detach(), non_blocking=value.is_cuda)


def mark(values: Iterable[torch.Tensor]) -> list[torch.cuda.Event]:
    """Events that have come when all copies from and to the GPUs of these tensors are done."""
    return [torch.cuda.current_stream(device).record_event() for device in {value.device for value in values}]


def allocate(node: Mapping[str, Any], template: Any, ferry: Ferry | None) -> tuple[torch.Tensor, Sink]:
    """A new tensor, and what takes its bytes. What goes to a GPU as a whole is made there."""
    shape, dtype = tuple(node["shape"]), parse(node["dtype"])
    if ferry is not None and on_gpu(template) and not is_sharded(template):
        tensor = torch.empty(shape, dtype=dtype, device=template.device)
        return tensor, ferry.to(tensor)
    tensor = torch.empty(shape, dtype=dtype)
    return tensor, Memory(bytes_of(tensor))


class Ferry:
    """Takes the bytes of one file to a GPU: one half of the buffer is under way while the other is filled."""

    SIZE = 2 * PIECE

    def __init__(self, buffer: Buffer) -> None:
        self._halves = [buffer.view[:PIECE], buffer.view[PIECE : self.SIZE]]
        self._sent: list[list[torch.cuda.Event]] = [[], []]

    def to(self, tensor: torch.Tensor) -> Sink:
        """What takes the bytes of this tensor."""
        return _Passage(self, tensor)

    def next_half(self) -> memoryview:
        """The half that was sent longer ago; waits until it has arrived."""
        self._halves.reverse()
        self._sent.reverse()
        for event in self._sent[0]:
            event.synchronize()
        return self._halves[0]

    def send(self, target: torch.Tensor) -> None:
        """Have the half that was given last copied to where it belongs."""
        piece = torch.frombuffer(self._halves[0][: target.numel()], dtype=torch.uint8)
        target.copy_(piece, non_blocking=True)
        self._sent[0] = mark([target])

    def arrive(self) -> None:
        """Wait for all that was sent: the buffer may be used by others afterwards."""
        for events in self._sent:
            for event in events:
                event.synchronize()


class _Passage:
    def __init__(self, ferry: Ferry, tensor: torch.Tensor) -> None:
        self._ferry = ferry
        self._target = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor

    def room(self, begin: int, length: int) -> memoryview:  # noqa: ARG002 - the protocol's
        return self._ferry.next_half()[:length]

    def filled(self, begin: int, length: int) -> None:
        self._ferry.send(self._target[begin : begin + length])


def finish(node: Mapping[str, Any], template: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - alike
    """The leaf itself: on the device of the template, and sharded as that is."""
    if template is ANYTHING:
        return tensor
    if is_sharded(template):
        from trainmaster.jobs.trees import torch_sharded

        return torch_sharded.shard_like(template, tensor)
    return tensor if template.is_meta else tensor.to(template.device)


def in_format(dtype: torch.dtype) -> bool:
    """Whether the file format has a word for this type."""
    return dtype in _FORMAT


def parse(name: str) -> torch.dtype:
    """The type of a name in tree.json.

    Raises:
        TypeError: this PyTorch has none of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"this PyTorch has no type {name}")
    return dtype


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host; the tensor must outlive it."""
    nbytes = tensor.numel() * tensor.element_size()
    return (
        memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B") if nbytes else memoryview(b"")
    )


def _identity(value: torch.Tensor) -> object:
    """Tied weights are two views of the same memory."""
    if value.is_meta or value.numel() == 0:
        return None
    return (
        "torch",
        value.device,
        value.data_ptr(),
        value.dtype,
        tuple(value.shape),
        value.stride(),
        value.is_conj(),
        value.is_neg(),
    )


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
