"""Data parallelism: each rank has all the weights, and computes its share of the data by the commands of rank 0.

Gradients stay on their rank until a step needs their sum.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from trainmaster.engine.types import Blame, EngineError

COMMAND_TIMEOUT = timedelta(days=365)
"""Ranks wait for commands without a limit. A rank that died is noticed by its closed connections."""
LEAVE_WITHIN = timedelta(seconds=10)
"""How long rank 0 waits at the end for the other ranks to leave."""
BUCKET_BYTES = 64 << 20
"""Gradients are summed in pieces of about this size: each small one would wait for the other ranks."""

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound="Commanded")


class Ranks:
    """The ranks that work together, here this one alone. All must call the same methods in the same order."""

    rank = 0
    size = 1

    def exchange(self, what: str, value: T) -> list[T]:  # noqa: ARG002
        """The values of all ranks, in order; `what` must be the same on all, and is for errors."""
        return [value]

    def sum(self, what: str, make: Callable[[], list[Tensor]]) -> list[Tensor]:  # noqa: ARG002
        """Sum the tensors that each rank makes, in place. If one rank cannot make them, all raise."""
        return make()

    def command(self, engine: Commanded, method: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        return method(engine, *args, **kwargs)


class Commanded(Protocol):
    ranks: Ranks

    def drop(self, model_id: object) -> bool:
        """Remove a model on this rank."""


class ProcessRanks(Ranks):
    """Processes, joined by torchrun's environment (RANK and others); in a command they may be `timeout_s` apart."""

    def __init__(self, device: torch.device, *, timeout_s: float = 600.0) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._store, self.rank, self.size = next(rendezvous("env://", timeout=timeout))
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.size, timeout=timeout)
        self._commands: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)

    def exchange(self, what: str, value: T) -> list[T]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (what, value), group=self._commands)
        if any(theirs != what for theirs, _ in found):
            raise RuntimeError(f"ranks are out of step: {', '.join(theirs for theirs, _ in found)}")
        return [each for _, each in found]

    def sum(self, what: str, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        tensors, failure = _attempt(make)
        for rank, theirs in enumerate(self.exchange(what, failure)):
            if theirs is not None:
                raise EngineError(f"rank {rank}: {theirs}", theirs.blame)
        assert tensors is not None
        for bucket in _buckets(tensors):
            joined = torch.cat([each.reshape(-1) for each in bucket])
            dist.all_reduce(joined)
            summed = torch.split_with_sizes(joined, [each.numel() for each in bucket])
            for each, of_all in zip(bucket, summed, strict=True):
                each.copy_(of_all.view_as(each))
        return tensors

    def command(self, engine: Commanded, method: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        if self.rank != 0:
            raise RuntimeError("commands are given to rank 0 alone")
        self._send((method.__name__, args, kwargs))
        return self._run(engine, method, args, kwargs)

    def follow(self, engine: Commanded) -> None:
        """Run the commands of rank 0 until it leaves, then disconnect; called on the other ranks."""
        while command := self._receive():
            name, args, kwargs = command
            try:
                self._run(engine, getattr(type(engine), name).__wrapped__, args, kwargs)
            except EngineError:
                continue  # rank 0 answers for it
        self._store.set(_left(self.rank), "")
        self._end()

    def leave(self) -> None:
        """Let the other ranks leave, then disconnect; called on rank 0."""
        self._send(())
        try:
            # A rank that is still reading would find the connection closed.
            self._store.wait([_left(rank) for rank in range(1, self.size)], LEAVE_WITHIN)
        except dist.DistStoreError as error:
            _log.warning("not every rank left in time: %s", error)
        self._end()

    def _end(self) -> None:
        """Disconnect. Threads of a connection that are left when the interpreter ends would abort the process."""
        self._commands = None  # the last reference to it but torch's own
        dist.destroy_process_group()

    def _send(self, command: tuple[Any, ...]) -> None:
        """Send a command to the other ranks: first all but its tensors, then each tensor."""
        described, tensors = parted(command)
        dist.broadcast_object_list([described], src=0, group=self._commands)
        for tensor in tensors:
            dist.broadcast(_bytes(tensor.detach().cpu().contiguous()), src=0, group=self._commands)

    def _receive(self) -> tuple[Any, ...]:
        slot: list[Any] = [None]
        dist.broadcast_object_list(slot, src=0, group=self._commands)
        command, tensors = joined(slot[0])
        for tensor in tensors:
            dist.broadcast(_bytes(tensor), src=0, group=self._commands)
        return command

    def _run(self, engine: Commanded, method: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """Run one method. If only some ranks fail, the copies of the model differ, so it is dropped on all."""
        result, failure = _attempt(lambda: method(engine, *args, **kwargs))
        failures = self.exchange(f"the end of {method.__name__}", failure)
        failed = [rank for rank, each in enumerate(failures) if each is not None]
        if not failed:
            return result  # type: ignore[return-value]
        cause = failures[failed[0]]
        assert cause is not None
        if len({str(each) for each in failures}) == 1:
            raise cause
        dropped = engine.drop(kwargs.get("model_id", args[0] if args else None))
        advice = "; the model is dropped in all ranks: create it again from a saved state" if dropped else ""
        raise EngineError(f"rank {failed[0]}: {cause}{advice}", Blame.SERVER)


def _left(rank: int) -> str:
    return f"trainmaster/left/{rank}"


def command(method: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], T]:
    """Make a method run on all ranks. Its first argument is a model's id, unless it cannot fail on one rank alone."""

    @functools.wraps(method)
    def run(engine: E, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return engine.ranks.command(engine, method, args, kwargs)

    return run


def join(device: torch.device) -> ProcessRanks | None:
    """The ranks that the environment declares; None if this is the only one."""
    return ProcessRanks(device) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None


def as_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    _log.error("a command failed", exc_info=error)
    kind = "out of memory" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
    return EngineError(f"{kind}: {error}", Blame.SERVER)


def _attempt(make: Callable[[], T]) -> tuple[T | None, EngineError | None]:
    """What was made, or the error: the other ranks wait for either."""
    try:
        return make(), None
    except Exception as error:
        return None, as_engine_error(error)


def parted(command: tuple[Any, ...]) -> tuple[bytes, list[Tensor]]:
    """A command as bytes without its tensors, and the tensors: a state may have gigabytes of them."""
    described = io.BytesIO()
    pickler = _Pickler(described)
    pickler.dump(command)
    return described.getvalue(), pickler.tensors


def joined(described: bytes) -> tuple[tuple[Any, ...], list[Tensor]]:
    """The command with empty tensors, and these in order, to be filled."""
    unpickler = _Unpickler(io.BytesIO(described))
    return unpickler.load(), unpickler.tensors


class _Pickler(pickle.Pickler):
    """Writes types and shapes in place of tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value)
        return value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    """Makes empty tensors in their place."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_load(self, described: tuple[torch.dtype, tuple[int, ...]]) -> Tensor:
        dtype, shape = described
        self.tensors.append(torch.empty(shape, dtype=dtype))
        return self.tensors[-1]


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor as bytes: not all types can be sent as they are."""
    return tensor.view(-1).view(torch.uint8)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one type, about BUCKET_BYTES each."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = sum(each.nbytes for each in bucket) + tensor.nbytes > BUCKET_BYTES
        if bucket and (full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
