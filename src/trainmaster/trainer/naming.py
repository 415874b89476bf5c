"""Names of jobs."""

from __future__ import annotations

import re
import secrets
import string

from trainmaster.trainer.constants import JOB_NAME_UUID_LENGTH
from trainmaster.trainer.errors import NameRefusedError

LONGEST = 63
_LEGAL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def random_name() -> str:
    """A name that nobody has: a letter and hexadecimal digits."""
    return secrets.choice(string.ascii_lowercase) + secrets.token_hex(JOB_NAME_UUID_LENGTH)[:JOB_NAME_UUID_LENGTH]


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
