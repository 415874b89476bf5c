"""Accounts, whose jobs, keys and files are kept apart, and their API keys, which are stored as digests."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum

ACCOUNT_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
"""An account's id is also the name of a directory."""
MAX_UID = 2**31 - 1
"""The largest integer that every database accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    account_id: str
    uid: int | None = None
    """The system user that runs its jobs on the server's machine; None: not set."""
    created_at: float = 0.0


def is_account_id(text: str) -> bool:
    return re.fullmatch(ACCOUNT_ID_PATTERN, text) is not None


DEFAULT_ACCOUNT = "default"
DEFAULT_PREFIX = "eyJ"
"""Clients of several protocols check a key's prefix; all of them accept this one, and take the key for a JSON Web
Token."""
_TOKEN_HEAD = "eyJhbGciOiJub25lIn0.eyJleHAiOjI1MzQwMjMwMDc5OX0."
"""`{"alg":"none"}` and `{"exp":253402300799}`: tinker 0.38 reads from such a key when it expires, here with the year
9999."""
PREFIX_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$"


class KeyScope(StrEnum):
    """What a key may do."""

    VIEW = "view"
    MANAGE = "manage"
    CLUSTER_ADMIN = "cluster_admin"
    EVALUATE = "evaluate"


def new_key(prefix: str = DEFAULT_PREFIX) -> str:
    """A new key: 256 random bits behind a prefix."""
    return (_TOKEN_HEAD if prefix == DEFAULT_PREFIX else prefix) + secrets.token_urlsafe(32)


def key_id_of(key: str) -> str:
    """The id of a key, by which it is listed, logged and revoked: the beginning of its digest."""
    return f"key-{key_digest(key)[:12]}"


def key_digest(key: str) -> str:
    """The stored form of a key. Keys are long and random: a plain digest cannot be reversed."""
    return hashlib.sha256(key.encode()).hexdigest()
