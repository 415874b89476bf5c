"""Names of jobs."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterator

from trainmaster.trainer.constants import JOB_NAME_UUID_LENGTH
from trainmaster.trainer.errors import NameRefusedError

LONGEST = 63
MOST_TRIED = 100
"""Names of retries that others may have before one goes without."""
_LEGAL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def random_name() -> str:
    """A name that nobody has: a letter and hexadecimal digits."""
    return secrets.choice(string.ascii_lowercase) + secrets.token_hex(JOB_NAME_UUID_LENGTH)[:JOB_NAME_UUID_LENGTH]


def successors(name: str | None, *, is_retry: bool) -> Iterator[str | None]:
    """Names of a retry, the best first: `lab-2` after `lab`, `lab-3` after the retry `lab-2`. None: no name."""
    if name is None:
        yield None
        return
    root, number = name, 1
    if is_retry and (numbered := re.fullmatch(r"(.+)-([1-9]\d{0,5})", name)):
        root, number = numbered[1], int(numbered[2])
    for following in range(number + 1, number + 1 + MOST_TRIED):
        ending = f"-{following}"
        yield root[: LONGEST - len(ending)].rstrip("-") + ending
    yield None


def check_name(name: object) -> str:
    """A name that a job can have.

    Raises:
        NameRefusedError: no job can.
    """
    if not isinstance(name, str) or not _LEGAL.fullmatch(name):
        raise NameRefusedError(
            f"{name!r} is no name for a job: 1 to {LONGEST} lower-case letters, digits and dashes, and no dash at "
            "either end"
        )
    return name
