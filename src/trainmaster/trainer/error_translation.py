"""What goes wrong between client and server, as the errors that `TrainerClient` promises."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence

import httpx

from trainmaster import client as api
from trainmaster.client.types import TERMINAL
from trainmaster.trainer.errors import NameRefusedError, NotFoundError

_HANDLE_TAKEN = "HANDLE_TAKEN"
_INVALID_TRANSITION = "INVALID_STATE_TRANSITION"
_OF_JOBS_THAT_GO_ON = ("cancel", "pause")
"""What can be asked of a job only before its end."""


_CONTAINERS_ONLY = re.compile(r"workload\.(image|volumes|container|initializers\..+\.image)")
IN_CONTAINERS = (
    "an image and volumes need containers, and this client's jobs run without: use "
    "TrainerClient(ContainerBackendConfig())"
)


def only_in_containers(problems: Sequence[api.FieldProblem]) -> bool:
    """Whether all that was refused is what backends without containers have not."""
    return bool(problems) and all(_CONTAINERS_ONLY.fullmatch(problem.field) for problem in problems)


@contextlib.contextmanager
def translated(job: str | None = None, *, new: str | None = None) -> Iterator[None]:
    """Raise what the block raises as one of the promised errors.

    `job` is the one that the block is about, and `new` the name of the one that it makes.

    Raises:
        NotFoundError: there is no such job.
        NameRefusedError: another job has the name.
        ValueError: the server refuses what was asked.
        TimeoutError: it does not answer in time.
        RuntimeError: it cannot be done now, or cannot be reached.
    """
    try:
        yield
    except api.NotFoundError as error:
        if job is not None:
            raise NotFoundError("job", job) from error
        raise RuntimeError(_message(error)) from error
    except api.ConflictError as error:
        if error.code == _HANDLE_TAKEN:
            raise NameRefusedError(f"another job has the name {new}" if new else _message(error)) from error
        raise RuntimeError(_already_ended(error, job) or _message(error)) from error
    except (api.RefusedError, api.InvalidError, api.ShippingError) as error:
        raise ValueError(_message(error)) from error
    except api.ClientError as error:
        if isinstance(error.__cause__, httpx.TimeoutException):
            raise TimeoutError(str(error)) from error
        raise RuntimeError(_message(error)) from error


def _already_ended(error: api.ConflictError, job: str | None) -> str | None:
    details = error.details
    if error.code != _INVALID_TRANSITION or not isinstance(details, Mapping) or job is None:
        return None
    if details.get("action") not in _OF_JOBS_THAT_GO_ON or details.get("status") not in TERMINAL:
        return None
    return f"job {job} has ended already ({details['status']})"


def _message(error: api.ClientError) -> str:
    problems = error.problems if isinstance(error, api.ApiError) else ()
    said = "; ".join(f"{problem.field}: {problem.message}" for problem in problems)
    return said or str(error)
