"""The processes that train together: how they are connected, the index of this one, and messages between them.

The messages are control traffic, small and rare, and nothing is pickled. Those of torch never wait for an accelerator;
JAX sends them through its own devices. All methods but `index` and `count` are collective: every process calls them, in
the same order, from the thread that trains.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

TIMEOUT_S = 1800.0
"""How long one process waits for the others, which may be saving or compiling."""


class ProcessError(RuntimeError):
    """The processes of the job are not at the same point, or one of them is gone."""


class Process(Protocol):
    @property
    def index(self) -> int:
        """The index of this process; process 0 commits checkpoints and reports."""

    @property
    def count(self) -> int:
        """The number of processes."""

    def barrier(self, name: str) -> None:
        """Wait until every process has reached the barrier of this name."""

    def broadcast(self, value: Any, name: str) -> Any:
        """Return the JSON value of process 0; those of the others are ignored."""

    def gather(self, value: bytes) -> list[bytes]:
        """On process 0, the bytes of every process, in order; on the others, an empty list."""

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""


class SingleProcess:
    index = 0
    count = 1

    def barrier(self, name: str) -> None:
        pass

    def broadcast(self, value: Any, name: str) -> Any:  # noqa: ARG002 - the protocol's
        return json.loads(json.dumps(value))

    def gather(self, value: bytes) -> list[bytes]:
        return [value]

    def any(self, flag: bool) -> bool:
        return flag


class TorchProcess:
    """A rank of `torch.distributed`, with its own gloo group, so that no message waits for a GPU. Made collectively."""

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        import torch.distributed

        self._torch, self._distributed = torch, torch.distributed
        self.index: int = torch.distributed.get_rank()
        self.count: int = torch.distributed.get_world_size()
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._group = torch.distributed.new_group(backend="gloo", timeout=self._timeout)

    def barrier(self, name: str) -> None:
        # On a time-out, the error of rank 0 names the ranks that did not come.
        try:
            self._distributed.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise ProcessError(f"rank {self.index} timed out at {name!r}: {error}") from error
        self.broadcast(None, name)  # compares the names

    def broadcast(self, value: Any, name: str) -> Any:
        data = self._broadcast_bytes(json.dumps([name, value]).encode() if self.index == 0 else b"", name)
        theirs, value = json.loads(data)
        if theirs != name:
            raise ProcessError(f"rank {self.index} is at {name!r}, but rank 0 is at {theirs!r}")
        return value

    def gather(self, value: bytes) -> list[bytes]:
        sizes = [self._torch.zeros(1, dtype=self._torch.int64) for _ in range(self.count)]
        self._distributed.all_gather(sizes, self._torch.tensor([len(value)]), group=self._group)
        longest = max(1, *(int(size) for size in sizes))
        padded = self._tensor(value.ljust(longest, b"\0"))
        into = [self._torch.empty_like(padded) for _ in range(self.count)] if self.index == 0 else None
        self._distributed.gather(padded, into, dst=0, group=self._group)
        if into is None:
            return []
        return [bytes(tensor.tolist())[: int(size)] for tensor, size in zip(into, sizes, strict=True)]

    def any(self, flag: bool) -> bool:
        found = self._torch.tensor([int(flag)], dtype=self._torch.int32)
        self._distributed.all_reduce(found, self._distributed.ReduceOp.MAX, group=self._group)
        return bool(found.item())

    def _broadcast_bytes(self, data: bytes, name: str) -> bytes:
        try:
            size = self._torch.tensor([len(data)])
            self._distributed.broadcast(size, 0, group=self._group)
            tensor = self._tensor(data) if self.index == 0 else self._torch.empty(int(size), dtype=self._torch.uint8)
            self._distributed.broadcast(tensor, 0, group=self._group)
        except RuntimeError as error:
            raise ProcessError(f"rank {self.index} received nothing at {name!r}: {error}") from error
        return bytes(tensor.tolist())

    def _tensor(self, data: bytes) -> Any:
        return self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)


class JaxProcess:
    def __init__(self) -> None:
        import jax
        import numpy
        from jax.experimental import multihost_utils

        self._numpy, self._messages = numpy, multihost_utils
        self.index: int = jax.process_index()
        self.count: int = jax.process_count()

    def barrier(self, name: str) -> None:
        try:
            self._messages.sync_global_devices(name)
        except (AssertionError, ValueError) as error:
            raise ProcessError(f"process {self.index} is at {name!r}: {error}") from error

    def broadcast(self, value: Any, name: str) -> Any:
        data = json.dumps([name, value]).encode() if self.index == 0 else b""
        size = int(self._messages.broadcast_one_to_all(self._numpy.int32(len(data))))
        padded = self._numpy.frombuffer(data.ljust(size, b"\0")[:size], dtype=self._numpy.uint8)
        theirs, value = json.loads(bytes(self._numpy.asarray(self._messages.broadcast_one_to_all(padded))))
        if theirs != name:
            raise ProcessError(f"process {self.index} is at {name!r}, but process 0 is at {theirs!r}")
        return value

    def gather(self, value: bytes) -> list[bytes]:
        sizes = self._messages.process_allgather(self._numpy.int32(len(value)))
        padded = self._numpy.frombuffer(value.ljust(max(1, int(sizes.max())), b"\0"), dtype=self._numpy.uint8)
        rows = self._messages.process_allgather(padded)
        return [] if self.index != 0 else [bytes(row)[: int(size)] for row, size in zip(rows, sizes, strict=True)]

    def any(self, flag: bool) -> bool:
        return bool(self._messages.process_allgather(self._numpy.asarray(flag)).any())


def current_process() -> Process:
    """This process among those that train together, which must be connected. The first call is collective."""
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_available() and torch_distributed.is_initialized():
        return _torch_process(torch_distributed)
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1:
        return JaxProcess()
    if (count := int(os.environ.get("WORLD_SIZE") or 1)) > 1:
        raise ProcessError(
            f"this job has {count} ranks, but they are not connected yet: "
            "call torch.distributed.init_process_group() or jax.distributed.initialize() first"
        )
    return SingleProcess()


def call_on_first(
    process: Process,
    name: str,
    work: Callable[[], T],
    *,
    errors: Iterable[type[Exception]] = (),
    otherwise: type[Exception] = ProcessError,
) -> T:
    """Call a function on process 0; every process returns its result, as JSON, or raises.

    Process 0 raises the function's own error. The others raise one of the same type if it is among `errors`, and an
    `otherwise` if not. `name` identifies the call in messages.
    """
    answer: dict[str, Any] = {}
    problem: BaseException | None = None
    if process.index == 0:
        try:
            answer = {"result": work()}
        except BaseException as error:
            problem, answer = error, {"error": type(error).__name__, "message": str(error)}
    answer = process.broadcast(answer, name)
    if problem is not None:
        raise problem
    if "error" in answer:
        for kind in errors:
            if kind.__name__ == answer["error"]:
                raise kind(answer["message"])
        raise otherwise(f"process 0 failed to {name}: {answer['error']}: {answer['message']}")
    result: T = answer["result"]
    return result


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Connect this process by torchrun's variables for a block, unless it is alone or its class has connected it."""
    count = int(os.environ.get("WORLD_SIZE") or 1)
    if count == 1:
        yield
    elif "jax" in sys.modules and "torch" not in sys.modules:
        _join_jax(count)
        yield
    else:
        with _joined_by_torch():
            yield


def _join_jax(count: int) -> None:
    import jax

    if not jax.distributed.is_initialized():  # JAX disconnects by itself when the interpreter ends
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        # Ranks of one node see all of its GPUs, and each would take all of them.
        beside = int(os.environ.get("LOCAL_WORLD_SIZE") or 1) > 1
        devices = [int(os.environ["LOCAL_RANK"])] if beside else None
        rank = int(os.environ["RANK"])
        jax.distributed.initialize(address, num_processes=count, process_id=rank, local_device_ids=devices)


@contextlib.contextmanager
def _joined_by_torch() -> Iterator[None]:
    import torch

    if torch.distributed.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl")
    else:
        torch.distributed.init_process_group("gloo")
    failed = False
    try:
        yield
    except Exception:
        failed = True
        raise
    finally:
        # After a failure on GPUs this may wait long for ranks that are gone, and the cause should be shown at once.
        if not (failed and torch.cuda.is_available()):
            # Explicitly: an interpreter that ends while the group's threads run may be aborted.
            torch.distributed.destroy_process_group()


_of_torch: list[tuple[Any, TorchProcess]] = []
"""The last default group, and its process: a new group for every call would leak."""


def _torch_process(torch_distributed: Any) -> Process:
    if torch_distributed.get_world_size() == 1:
        return SingleProcess()
    group = torch_distributed.group.WORLD
    if not _of_torch or _of_torch[0][0] is not group:
        _of_torch[:] = [(group, TorchProcess())]
        # A group that still exists when the interpreter exits may abort the process: its threads run on.
        atexit.unregister(_of_torch.clear)
        atexit.register(_of_torch.clear)
    return _of_torch[0][1]
