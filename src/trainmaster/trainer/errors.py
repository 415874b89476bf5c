"""The errors that `TrainerClient` raises, and their translation from those of the HTTP client."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import httpx

from trainmaster import client as api
from trainmaster.client.types import TERMINAL


class NotFoundError(LookupError, ValueError, RuntimeError):
    """There is no job or no runtime of that name.

    Kubeflow raises a ValueError for it on some backends and a RuntimeError on others: whoever caught either still does.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str] = ()) -> None:
        self.kind = kind
        """What was looked for: `job` or `runtime`."""
        self.name = name
        self.known = tuple(known)
        """Names that would have been found, where there are few enough to say."""
        hint = f"; there are: {', '.join(self.known)}" if self.known else ""
        super().__init__(f"there is no {kind} named {name!r}{hint}")

    def __reduce__(self) -> tuple[type[NotFoundError], tuple[str, str, tuple[str, ...]]]:
        # An exception is pickled as its class and the one message, with which this class cannot be made again.
        return type(self), (self.kind, self.name, self.known)


class NameRefusedError(ValueError, RuntimeError):
    """A job cannot have that name: it is none, or another job has it. Kubeflow raises a RuntimeError for it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


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
    """Raise what the block raises as one of the promised errors: those above, ValueError, TimeoutError, RuntimeError.

    `job` is the one that the block is about, and `new` the name of the one that it makes.
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
    except (api.RefusedError, api.InvalidError, api.UploadError) as error:
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
    return "; ".join(f"{problem.field}: {problem.message}" for problem in problems) or str(error)
