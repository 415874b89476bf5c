"""Tensors of PyTorch as leaves, whole or sharded (DTensor). Imported when a tree holds one.

Each rank writes its part of a DTensor, as FSDP2 has them, and any number of ranks can read them again. Those files are
in the safetensors form of PyTorch's distributed checkpoint, which reads them: it can put a differently sharded tensor
together. They are written here because its own writer makes one more copy of everything, holds the GIL meanwhile, and
talks to the other ranks from the thread that it runs in.
"""

from __future__ import annotations

import ctypes
import json
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainmaster.jobs.checkpoint import CorruptCheckpointError
from trainmaster.jobs.trees.buffers import Buffer
from trainmaster.jobs.trees.safetensors import PIECE, TYPES, Memory, Sink, TensorEntry
from trainmaster.jobs.trees.structure import ANYTHING, Described, Node, WantedArray

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SHARDED = "torch-sharded"
SHARDED_DIRECTORY = "sharded"
_THREADS = 8


def describe(value: object) -> Described | None:
    """Describe a tensor; None for all else. TypeError: the tensor's bytes alone do not describe it."""
    if not isinstance(value, torch.Tensor):
        return None
    dtype = _spell(value.dtype)
    if is_sharded(value):
        return Described(kind=SHARDED, dtype=dtype, shape=tuple(value.shape), identity=("torch", id(value)))
    if is_traceable_wrapper_subclass(value) or type(value).__name__ == "ShardedTensor":
        raise TypeError(f"a {type(value).__name__}: unwrap it first")
    if value.layout != torch.strided or value.is_quantized:
        raise TypeError("a sparse or quantized tensor: make it dense first")
    return Described(kind="torch", dtype=dtype, shape=tuple(value.shape), identity=_identity(value))


def is_sharded(value: object) -> TypeGuard[DTensor]:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def entry(name: str, value: torch.Tensor) -> TensorEntry:
    if value.is_meta:
        raise TypeError("a meta tensor has no data")
    return TensorEntry.of(name, _spell(value.dtype), tuple(value.shape), value.nbytes)


def itemsize(value: torch.Tensor) -> int:
    return value.element_size()


def on_gpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def fill(value: torch.Tensor, view: memoryview) -> None:
    """Copy the elements into a view. From a GPU the copy only starts; `mark` tells when it is done."""
    if value.numel() == 0:
        return
    target = torch.frombuffer(view, dtype=torch.uint8).view(value.dtype).view(value.shape)
    target.copy_(value.detach(), non_blocking=value.is_cuda)


def mark(values: Iterable[torch.Tensor]) -> list[torch.cuda.Event]:
    """Record events that complete when all copies from and to the GPUs of these tensors are done."""
    return [torch.cuda.current_stream(device).record_event() for device in {value.device for value in values}]


def allocate(node: Node, template: Any, copier: HostToDeviceCopier | None) -> tuple[torch.Tensor, Sink]:
    """Make a new tensor, and what takes its bytes. A tensor that goes to a GPU as a whole is made there."""
    shape, dtype = tuple(node["shape"]), _parse(node["dtype"])
    if copier is not None and on_gpu(template) and not is_sharded(template):
        tensor = torch.empty(shape, dtype=dtype, device=template.device)
        return tensor, copier.to(tensor)
    tensor = torch.empty(shape, dtype=dtype)
    return tensor, Memory(_bytes_of(tensor))


class HostToDeviceCopier:
    """Copies the bytes of one file to a GPU: one half of the buffer is in flight while the other is filled."""

    SIZE = 2 * PIECE

    def __init__(self, buffer: Buffer) -> None:
        self._halves = [buffer.view[:PIECE], buffer.view[PIECE : self.SIZE]]
        self._sent: list[list[torch.cuda.Event]] = [[], []]

    def to(self, tensor: torch.Tensor) -> Sink:
        return _DeviceSink(self, tensor)

    def next_half(self) -> memoryview:
        """Wait for the half that was sent longer ago, and return it."""
        self._halves.reverse()
        self._sent.reverse()
        for event in self._sent[0]:
            event.synchronize()
        return self._halves[0]

    def send(self, target: torch.Tensor) -> None:
        """Copy the half that was returned last to its place."""
        piece = torch.frombuffer(self._halves[0][: target.numel()], dtype=torch.uint8)
        target.copy_(piece, non_blocking=True)
        self._sent[0] = mark([target])

    def arrive(self) -> None:
        """Wait for all copies: the buffer may be used by others afterwards."""
        for events in self._sent:
            for event in events:
                event.synchronize()


class _DeviceSink:
    def __init__(self, copier: HostToDeviceCopier, tensor: torch.Tensor) -> None:
        self._copier = copier
        self._target = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor

    def room(self, begin: int, length: int) -> memoryview:  # noqa: ARG002 - the protocol's
        return self._copier.next_half()[:length]

    def filled(self, begin: int, length: int) -> None:
        self._copier.send(self._target[begin : begin + length])


def finish(_node: Node, template: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Put a tensor on the device of the template, and shard it as the template is."""
    if template is ANYTHING:
        return tensor
    if is_sharded(template):
        return _shard_like(template, tensor)
    placed: torch.Tensor = tensor if template.is_meta else tensor.to(template.device)
    return placed


def sharded_part(name: str, value: DTensor) -> tuple[TensorEntry, torch.Tensor, list[int]] | None:
    """This rank's part of a tensor, and its offsets in the whole; None where another rank writes the same part."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in value.placements):
        raise TypeError("a DTensor that is a partial sum: redistribute it first")
    if _spell(value.dtype) not in TYPES:
        raise TypeError(f"a DTensor of {value.dtype}")
    if (coordinate := value.device_mesh.get_coordinate()) is None:
        return None
    copies = zip(coordinate, value.placements, strict=True)
    if any(position != 0 and isinstance(placement, Replicate) for position, placement in copies):
        return None
    local = value.to_local()
    if value.numel() and not local.numel():
        return None
    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return entry(name, local), local, list(offsets)


def sharded_metadata(offsets: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """The header metadata of a file with parts that begin at these offsets."""
    from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

    parts = {name: {SAVED_OFFSETS_KEY: list(each)} for name, each in offsets.items()}
    return {CUSTOM_METADATA_KEY: json.dumps(parts), "format": "pt"}


def read_sharded(directory: Path, wanted: Sequence[WantedArray]) -> list[torch.Tensor]:
    """Read tensors like their templates: sharded over any mesh, or whole. Each rank reads what it needs itself."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    targets: dict[str, torch.Tensor] = {}
    for leaf in wanted:
        # Two leaves may be one array.
        if leaf.node["name"] not in targets:
            targets[leaf.node["name"]] = _empty(leaf)
    reader = HuggingFaceStorageReader(str(directory / SHARDED_DIRECTORY), thread_count=_THREADS)
    with warnings.catch_warnings():
        # Each rank reads by itself on purpose: a rank that fails must not leave the others waiting for it.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            load(targets, storage_reader=reader, no_dist=True)
        except CheckpointException as error:  # whatever the cause was; no subclass of Exception
            raise CorruptCheckpointError(f"{directory / SHARDED_DIRECTORY}: {str(error).splitlines()[-1]}") from error
    found = ((targets[leaf.node["name"]], leaf.template) for leaf in wanted)
    return [tensor if is_sharded(tensor) else finish({}, template, tensor) for tensor, template in found]


def _shard_like(template: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that was saved whole, as a DTensor like the template."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = template.device_mesh, template.placements
    shape, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    part = whole[tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))]
    local = part.to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _empty(leaf: WantedArray) -> torch.Tensor:
    shape, dtype = leaf.node["shape"], _parse(leaf.node["dtype"])
    if is_sharded(leaf.template):
        from torch.distributed.tensor import empty

        mesh, placements = leaf.template.device_mesh, leaf.template.placements
        return empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return torch.empty(shape, dtype=dtype)


def _parse(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"this PyTorch has no type {name}")
    return dtype


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host; the tensor must outlive it."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


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
