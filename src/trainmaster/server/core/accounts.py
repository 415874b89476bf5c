"""Accounts: whose jobs, keys and files are kept apart."""

from __future__ import annotations

import re
from dataclasses import dataclass

ACCOUNT_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
"""An account's id is also the name of a directory."""
MAX_UID = 2**31 - 1
"""What every database takes."""

_ACCOUNT_ID = re.compile(ACCOUNT_ID_PATTERN.removeprefix("^").removesuffix("$"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Somebody who shares the cluster."""

    account_id: str
    uid: int | None = None
    """The system's user as whom its jobs run on the server's machine; None means that none was set."""
    created_at: float = 0.0


def is_account_id(text: str) -> bool:
    """Whether an account may be called so."""
    return _ACCOUNT_ID.fullmatch(text) is not None
