"""Which library an array belongs to, and what each library's module, which is imported on use, offers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from trainmaster.jobs.trees.safetensors import Sink, TensorEntry
from trainmaster.jobs.trees.structure import Described, Node, TreeError

if TYPE_CHECKING:
    from trainmaster.jobs.trees.torch_tensors import HostToDeviceCopier

Array: TypeAlias = Any
"""An array of NumPy, PyTorch or JAX; the three have no type in common."""


class ArrayModule(Protocol):
    """A module for arrays that are written to safetensors files here."""

    def entry(self, name: str, value: Array, /) -> TensorEntry:
        """The layout of an array in a file."""

    def itemsize(self, value: Array, /) -> int:
        """Bytes of one element."""

    def on_gpu(self, value: object, /) -> bool:
        """Whether page-locked memory makes copies of it faster."""

    def fill(self, value: Array, view: memoryview, /) -> None:
        """Copy the elements into a view. From a GPU the copy only starts; `torch_tensors.mark` tells when it ends."""

    def allocate(self, node: Node, template: Array, copier: HostToDeviceCopier | None, /) -> tuple[Array, Sink]:
        """Make a new array, and what takes its bytes."""

    def finish(self, node: Node, template: Array, array: Array, /) -> Array:
        """Make the leaf of an array that was read: on the device of the template, and sharded as that is."""


def module_for(kind: str) -> ArrayModule:
    with library(kind):
        if kind.startswith("torch"):
            from trainmaster.jobs.trees import torch_tensors

            return torch_tensors
        if kind == "numpy":
            from trainmaster.jobs.trees import numpy_arrays

            return numpy_arrays
    raise TreeError(f"the checkpoint holds arrays of {kind!r}, which this version does not know")


def describe_array(value: object) -> Described | None:
    """Describe an array; None for a value that is none. Raises TypeError for an array that cannot be saved."""
    found: Described | None = None
    if "torch" in sys.modules:
        from trainmaster.jobs.trees import torch_tensors

        found = torch_tensors.describe(value)
    # Before NumPy: an array of JAX may pass for one of NumPy.
    if found is None and "jax" in sys.modules:
        with library("jax"):
            from trainmaster.jobs.trees import jax_arrays

            found = jax_arrays.describe(value)
    if found is None and "numpy" in sys.modules:
        from trainmaster.jobs.trees import numpy_arrays

        found = numpy_arrays.describe(value)
    return found


@contextlib.contextmanager
def library(kind: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        library = kind.partition("-")[0]
        raise TreeError(f"the checkpoint holds arrays of {library}, which cannot be imported: {error}") from error
