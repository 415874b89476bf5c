"""DTensors, as FSDP2 has them: each rank writes its part, and any number of ranks can read them again.

The files are those of PyTorch's distributed checkpoint in its safetensors form, and it reads them: it knows how
to put a differently sharded tensor together. They are written here, because its own writer makes one more copy
of everything, holds the GIL while it does, and talks to the other ranks from whatever thread it runs in.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, load
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.tensor import DTensor, Replicate, empty
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainmaster.jobs.checkpoint import CorruptCheckpointError
from trainmaster.jobs.trees import torch_tensors
from trainmaster.jobs.trees.structure import ANYTHING, Wanted
from trainmaster.jobs.trees.writer import Piece

DIRECTORY = "sharded"
THREADS = 8


def parts(name: str, value: DTensor) -> list[Piece]:
    """What this rank writes of a tensor: nothing where another rank has the same.

    Raises:
        TypeError: its parts would have to be summed first, or the files cannot hold its type.
    """
    if any(placement.is_partial() for placement in value.placements):
        raise TypeError("a DTensor that is a partial sum: redistribute it first")
    if not torch_tensors.in_format(value.dtype):
        raise TypeError(f"a DTensor of {value.dtype}")
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    copies = zip(coordinate, value.placements, strict=True)
    if any(position != 0 and isinstance(placement, Replicate) for position, placement in copies):
        return []
    local = value.to_local()
    if value.numel() and not local.numel():
        return []
    _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    entry = torch_tensors.entry(name, local)
    return [Piece(entry=entry, value=local, adapter=torch_tensors, metadata={SAVED_OFFSETS_KEY: list(offsets)})]


def metadata(pieces: Iterable[Piece]) -> dict[str, str]:
    """What a file has to say of its parts."""
    return {CUSTOM_METADATA_KEY: json.dumps({piece.entry.name: piece.metadata for piece in pieces}), "format": "pt"}


def read(directory: Path, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
    """Tensors as the templates are: sharded over whatever mesh, or whole. Each rank reads what it needs itself."""
    targets: dict[str, torch.Tensor] = {}
    for leaf in wanted:
        # Two leaves may be one array.
        if leaf.node["name"] not in targets:
            targets[leaf.node["name"]] = _empty(leaf)
    reader = HuggingFaceStorageReader(str(directory / DIRECTORY), thread_count=THREADS)
    with warnings.catch_warnings():
        # That it reads by itself is the intent: a rank that fails must not leave the others waiting for it.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            load(targets, storage_reader=reader, no_dist=True)
        except CheckpointException as error:  # of whatever went wrong; no subclass of Exception
            raise CorruptCheckpointError(f"{directory / DIRECTORY}: {str(error).splitlines()[-1]}") from error
    return [_finished(targets[leaf.node["name"]], leaf.template) for leaf in wanted]


def shard_like(template: DTensor, whole: torch.Tensor) -> DTensor:
    """This rank's part of a tensor that was saved whole, as a DTensor like the template."""
    mesh, placements = template.device_mesh, template.placements
    shape, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    part = whole[tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))]
    local = part.to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _empty(leaf: Wanted) -> torch.Tensor:
    shape, dtype = leaf.node["shape"], torch_tensors.parse(leaf.node["dtype"])
    if isinstance(leaf.template, DTensor):
        mesh, placements = leaf.template.device_mesh, leaf.template.placements
        return empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return torch.empty(shape, dtype=dtype)


def _finished(tensor: torch.Tensor, template: Any) -> torch.Tensor:
    if template is ANYTHING or isinstance(tensor, DTensor):
        return tensor
    return torch_tensors.finish({}, template, tensor)
