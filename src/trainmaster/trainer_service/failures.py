"""What an exception means: for the request that met it, for its model, and for the process."""

from __future__ import annotations

import traceback

import torch

from trainmaster.engine.types import Blame, EngineError
from trainmaster.jobs.attempt import NotOwnerError
from trainmaster.trainer_service.messages import Reply


class FatalError(RuntimeError):
    """The engine can no longer be trusted: the process has to end."""


def reply_to_failure(request_id: str, error: BaseException) -> Reply:
    """The answer to a request that failed.

    Raises:
        FatalError: no request can be done any more.
    """
    if is_fatal(error) or is_fatal(error.__cause__):
        raise FatalError(f"{type(error).__name__}: {error}") from error
    if isinstance(error, EngineError):
        return Reply(request_id=request_id, error=str(error), category=error.blame)
    if is_out_of_memory(error):
        _free_device_memory()
        message = f"out of memory: send less at a time, or unload models ({_first_line(error)})"
    else:
        # Nobody but the log can say where it came from.
        traceback.print_exception(error)
        message = f"{type(error).__name__}: {error}"
    return Reply(request_id=request_id, error=message, category=Blame.SERVER)


def is_fatal(error: BaseException | None) -> bool:
    """Whether the process is of no use any more: its device has failed, or its job belongs to somebody else."""
    return isinstance(error, (NotOwnerError, torch.AcceleratorError, FatalError))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short: the device's, or this machine's."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _free_device_memory() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
