"""Several ranks that train one set of models: each has all the weights and computes its share of the data.

Rank 0 is told what to do and tells the others, and every rank runs the same command of `Engine`. Gradients stay where
they were computed until a step needs their sum.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from trainmaster.engine.types import Blame, EngineError

if TYPE_CHECKING:
    from trainmaster.engine.engine import Engine

COMMAND_TIMEOUT = timedelta(days=365)
"""Ranks wait for commands as long as nobody sends one. A rank that died is noticed by its closed connections."""
LEAVE_WITHIN = timedelta(seconds=10)
"""How long rank 0 waits at the end for the others to have heard of it."""
BUCKET_BYTES = 64 << 20
"""Gradients are summed in pieces of about this size: one after the other, many small ones would each wait for an answer
from the other ranks."""

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Ranks(Protocol):
    """The ranks that work together, as one of them sees them. All have to call the same methods in the same order."""

    rank: int
    size: int

    def exchange(self, what: str, value: T) -> list[T]:
        """The values of all ranks, in order; `what` says of what, and has to be the same in all."""

    def sum(self, what: str, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The tensors that each rank makes, summed over all in place. If one cannot make them, all raise."""

    def command(self, engine: Engine, method: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """Run a method of the engines of all ranks."""


class OneRank:
    """No others."""

    rank = 0
    size = 1

    def exchange(self, what: str, value: T) -> list[T]:  # noqa: ARG002
        """The value."""
        return [value]

    def sum(self, what: str, make: Callable[[], list[Tensor]]) -> list[Tensor]:  # noqa: ARG002
        """The tensors."""
        return make()

    def command(self, engine: Engine, method: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """Run the method."""
        return method(engine, *args, **kwargs)


class ProcessRanks:
    """Ranks that are processes, found as `torchrun` says: by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Args:
        device: Of this rank.
        timeout_s: How far apart ranks may be within one command.
    """

    def __init__(self, device: torch.device, *, timeout_s: float = 600.0) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._store, self.rank, self.size = next(rendezvous("env://", timeout=timeout))
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=self._store, rank=self.rank, world_size=self.size, timeout=timeout)
        self._commands: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)

    def exchange(self, what: str, value: T) -> list[T]:
        """The values of all ranks, in order."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (what, value), group=self._commands)
        if any(theirs != what for theirs, _ in found):
            raise RuntimeError(f"ranks are out of step: {', '.join(theirs for theirs, _ in found)}")
        return [each for _, each in found]

    def sum(self, what: str, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The tensors, summed over all ranks in place."""
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

    def command(self, engine: Engine, method: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """Run the method here and in all other ranks; of rank 0."""
        if self.rank != 0:
            raise RuntimeError("commands are given to rank 0 alone")
        self._tell((method.__name__, args, kwargs))
        return self._run(engine, method, args, kwargs)

    def follow(self, engine: Engine) -> None:
        """Run what rank 0 is told, until it leaves, and end the connections; of all other ranks."""
        while command := self._told():
            name, args, kwargs = command
            try:
                self._run(engine, getattr(type(engine), name).__wrapped__, args, kwargs)
            except EngineError:
                continue  # rank 0 answers for it
        self._store.set(_left(self.rank), "")
        self._end()

    def leave(self) -> None:
        """End the other ranks' following, and the connections; of rank 0."""
        self._tell(())
        try:
            # A rank that is still reading would find the connection closed.
            self._store.wait([_left(rank) for rank in range(1, self.size)], LEAVE_WITHIN)
        except dist.DistStoreError as error:
            _log.warning("not every rank said that it ends: %s", error)
        self._end()

    def _end(self) -> None:
        """End the connections. Threads of theirs that are left when the interpreter ends would abort the process."""
        self._commands = None  # the last reference to it but torch's own
        dist.destroy_process_group()

    def _tell(self, command: tuple[Any, ...]) -> None:
        """Send the other ranks a command: first all but its tensors, then one tensor after the other."""
        described, tensors = parted(command)
        dist.broadcast_object_list([described], src=0, group=self._commands)
        for tensor in tensors:
            dist.broadcast(_bytes(tensor.detach().cpu().contiguous()), src=0, group=self._commands)

    def _told(self) -> tuple[Any, ...]:
        """The next command."""
        slot: list[Any] = [None]
        dist.broadcast_object_list(slot, src=0, group=self._commands)
        command, tensors = joined(slot[0])
        for tensor in tensors:
            dist.broadcast(_bytes(tensor), src=0, group=self._commands)
        return command

    def _run(self, engine: Engine, method: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """Run one method. Where it failed in some ranks alone, their models are no longer the same: it goes in all."""
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
        told = "; the model is dropped in all ranks: create it again from a saved state" if dropped else ""
        raise EngineError(f"rank {failed[0]}: {cause}{told}", Blame.SERVER)


def _left(rank: int) -> str:
    return f"trainmaster/left/{rank}"


def command(method: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[Engine, P], T]:
    """Make a method of `Engine` one that all ranks run. Its first argument is a model's id, or it cannot fail alone."""

    @functools.wraps(method)
    def run(engine: Engine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return engine.ranks.command(engine, method, args, kwargs)

    return run


def join(device: torch.device) -> ProcessRanks | None:
    """The ranks that the environment speaks of; None if this is the only one."""
    return ProcessRanks(device) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None


def as_engine_error(error: Exception) -> EngineError:
    """What a request is told of an error that is not its own."""
    if isinstance(error, EngineError):
        return error
    _log.error("a command failed", exc_info=error)
    told = "out of memory" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
    return EngineError(f"{told}: {error}", Blame.SERVER)


def _attempt(make: Callable[[], T]) -> tuple[T | None, EngineError | None]:
    """What was made, or why not: the other ranks wait for either."""
    try:
        return make(), None
    except Exception as error:
        return None, as_engine_error(error)


def parted(command: tuple[Any, ...]) -> tuple[bytes, list[Tensor]]:
    """A command as bytes, without the tensors in it, and these: a state may be gigabytes of them."""
    described = io.BytesIO()
    pickler = _Pickler(described)
    pickler.dump(command)
    return described.getvalue(), pickler.tensors


def joined(described: bytes) -> tuple[tuple[Any, ...], list[Tensor]]:
    """The command, with tensors in it that have still to be filled, and these in order."""
    unpickler = _Unpickler(io.BytesIO(described))
    return unpickler.load(), unpickler.tensors


class _Pickler(pickle.Pickler):
    """Puts the types and shapes of tensors in their places."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value)
        return value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    """Reads what rank 0 wrote, with empty tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_load(self, described: tuple[torch.dtype, tuple[int, ...]]) -> Tensor:
        dtype, shape = described
        self.tensors.append(torch.empty(shape, dtype=dtype))
        return self.tensors[-1]


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor: not all types can be sent as they are."""
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
