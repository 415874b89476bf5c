"""What `TrainerClient` raises beside the built-in errors.

ValueError, RuntimeError, LookupError
├── NotFoundError           there is no job or no runtime of that name
└── NameRefusedError        a job cannot have that name (not a LookupError)
"""

from __future__ import annotations

from collections.abc import Iterable


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
    """A job cannot have that name: it is none, or another job has it.

    Kubeflow's Kubernetes backend raises a RuntimeError for it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
