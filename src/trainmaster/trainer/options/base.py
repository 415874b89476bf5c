"""What an option is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

JobDocument = dict[str, Any]
"""A submission, as docs/job-fields.md has it."""


class Option(ABC):
    """One thing that is asked of a job."""

    backends: ClassVar[tuple[str, ...]] = ()
    """The kinds of backend that can do it; none named: all of them."""
    trainers: ClassVar[tuple[type, ...]] = ()
    """The trainers that have a use for it; none named: all of them."""

    def __call__(self, job_spec: JobDocument, trainer: object = None, backend: str | None = None) -> None:
        """Ask it of a job.

        Raises:
            ValueError: That backend cannot do it, or the trainer has no use for it.
        """
        name = type(self).__name__
        if self.backends and backend is not None and backend not in self.backends:
            raise ValueError(f"the option {name} needs the backend {_either(self.backends)}, and this one is {backend}")
        if self.trainers and trainer is not None and not isinstance(trainer, self.trainers):
            wanted = _either(each.__name__ for each in self.trainers)
            raise ValueError(f"the option {name} needs a {wanted}, and the trainer is a {type(trainer).__name__}")
        self._change(job_spec)

    @abstractmethod
    def _change(self, job: JobDocument) -> None: ...


def require(holder: object, field: str, fine: bool, wanted: str) -> None:
    """Refuse a field that is not what it must be."""
    if not fine:
        raise ValueError(f"{type(holder).__name__}: {field} must be {wanted}, not {getattr(holder, field)!r}")


def is_whole(value: object, *, least: int, most: int | None = None) -> bool:
    """Whether it is a whole number in that range; truth values are none."""
    return type(value) is int and value >= least and (most is None or value <= most)


def is_texts(value: object) -> bool:
    """Whether it is a list of text."""
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def is_text_to_text(value: object) -> bool:
    """Whether it is a dictionary from text to text."""
    return isinstance(value, dict) and is_texts([*value.keys(), *value.values()])


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)
