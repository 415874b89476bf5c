"""API keys: made here, shown once, stored as a digest."""

from __future__ import annotations

import hashlib
import secrets
from enum import StrEnum

DEFAULT_ACCOUNT = "default"
DEFAULT_PREFIX = "eyJ"
"""Clients of several protocols look at how a key begins; all of them take this."""
PREFIX_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$"


class KeyScope(StrEnum):
    """What a key may do."""

    VIEW = "view"
    MANAGE = "manage"
    CLUSTER_ADMIN = "cluster_admin"
    EVALUATE = "evaluate"


def new_key(prefix: str = DEFAULT_PREFIX) -> str:
    """A new key: 256 random bits behind a prefix."""
    return prefix + secrets.token_urlsafe(32)


def key_id_of(key: str) -> str:
    """The id of a key, by which it is listed, logged and revoked: the beginning of its digest."""
    return f"key-{key_digest(key)[:12]}"


def key_digest(key: str) -> str:
    """What is stored of a key. The key is random and long: a plain digest cannot be turned back."""
    return hashlib.sha256(key.encode()).hexdigest()
