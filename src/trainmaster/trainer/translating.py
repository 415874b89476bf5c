"""What goes wrong between client and server, as the errors that `TrainerClient` promises."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx

from trainmaster import sdk
from trainmaster.trainer.errors import NameRefusedError, NotFoundError

_HANDLE_TAKEN = "HANDLE_TAKEN"


@contextlib.contextmanager
def translated(job: str | None = None) -> Iterator[None]:
    """Raise what the block raises as one of the promised errors; `job` is the one that the block is about.

    Raises:
        NotFoundError: there is no such job.
        NameRefusedError: another job has the name.
        ValueError: the server refuses what was asked.
        TimeoutError: it does not answer in time.
        RuntimeError: it cannot be done now, or cannot be reached.
    """
    try:
        yield
    except sdk.NotFoundError as error:
        if job is not None:
            raise NotFoundError("job", job) from error
        raise RuntimeError(_message(error)) from error
    except sdk.ConflictError as error:
        if error.code == _HANDLE_TAKEN:
            raise NameRefusedError(_message(error)) from error
        raise RuntimeError(_message(error)) from error
    except (sdk.RefusedError, sdk.InvalidError, sdk.ShippingError) as error:
        raise ValueError(_message(error)) from error
    except sdk.SdkError as error:
        if isinstance(error.__cause__, httpx.TimeoutException):
            raise TimeoutError(str(error)) from error
        raise RuntimeError(_message(error)) from error


def _message(error: sdk.SdkError) -> str:
    problems = error.problems if isinstance(error, sdk.ApiError) else ()
    said = "; ".join(f"{problem.field}: {problem.message}" for problem in problems)
    return said or str(error)
