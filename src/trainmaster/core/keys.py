"""API keys: made here, shown once, stored as a digest."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from enum import StrEnum

DEFAULT_ACCOUNT = "default"


class KeyScope(StrEnum):
    """What a key may do."""

    VIEW = "view"
    MANAGE = "manage"
    CLUSTER_ADMIN = "cluster_admin"
    EVALUATE = "evaluate"


def new_key() -> str:
    """A new key: a readable head with an id of its own, and 256 random bits."""
    key_id = f"key-{secrets.token_hex(4)}"
    head = base64.urlsafe_b64encode(json.dumps({"kid": key_id}, separators=(",", ":")).encode()).rstrip(b"=").decode()
    return f"{head}.{secrets.token_urlsafe(32)}"


def key_id_of(key: str) -> str:
    """The id in a key's head.

    Raises:
        ValueError: it is no key of ours.
    """
    head = key.partition(".")[0]
    return str(json.loads(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))["kid"])


def key_digest(key: str) -> str:
    """What is stored of a key. The key is random and long: a plain digest cannot be turned back."""
    return hashlib.sha256(key.encode()).hexdigest()
