"""Who is asking: API keys for people and programs, one token for each attempt's workers, another for its ranks.

A key is known by its digest alone. A token is good for the routes of its attempt and for nothing else, and a
key is not good there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from trainmaster.api.context import ApiContext
from trainmaster.api.errors import InsufficientScopeError, InvalidTokenError, UnauthenticatedError
from trainmaster.api.requests import ALIAS, PREFIX
from trainmaster.core.keys import KeyScope, key_digest
from trainmaster.store import keys
from trainmaster.store.keys import ApiKey
from trainmaster.store.scope import Scope

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Answered to anybody."""
TOKEN_PATHS = tuple(f"{prefix}/{part}/" for prefix in (PREFIX, PREFIX + ALIAS) for part in ("worker", "blobs"))
"""Where an attempt's token may be what is sent; those routes check it themselves."""

_REMEMBER_S = 5.0
"""How long a revoked key may go on working; a look-up on every request would cost more than the request."""
_REMEMBER_KEYS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Whom a key stands for."""

    account_id: str
    key_id: str
    name: str
    scopes: frozenset[str]

    @property
    def scope(self) -> Scope:
        """What of the store it may see."""
        return Scope(self.account_id)


class Gate:
    """Lets requests in, or raises."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._known: dict[str, tuple[float, Principal | None]] = {}

    async def admit(self, scope: Any, path: str) -> None:
        """Find out who sends a request, and note it in the scope's state.

        Raises:
            UnauthenticatedError: it has no credentials, or wrong ones.
        """
        if path in OPEN_PATHS:
            return
        credential = _credential(scope["headers"])
        if credential is None:
            raise UnauthenticatedError
        principal = await self._principal(key_digest(credential))
        if principal is None and not path.startswith(TOKEN_PATHS):
            raise InvalidTokenError
        state = scope["state"]
        state["credential"] = credential
        state["principal"] = principal

    async def _principal(self, digest: str) -> Principal | None:
        now = time.monotonic()
        expires, principal = self._known.get(digest, (0.0, None))
        if now < expires:
            return principal
        key = await self._context.read(lambda connection: keys.find_by_hash(connection, Scope.everything(), digest))
        principal = None if key is None else _principal(key)
        if len(self._known) >= _REMEMBER_KEYS:
            self._known.clear()
        self._known[digest] = (now + _REMEMBER_S, principal)
        return principal


def _principal(key: ApiKey) -> Principal:
    return Principal(account_id=key.account_id, key_id=key.key_id, name=key.name, scopes=frozenset(key.scopes))


def require(request: Request, scope: KeyScope) -> Principal:
    """Whom the request's key stands for.

    Raises:
        InvalidTokenError: it has no key, but a worker's token.
        InsufficientScopeError: the key lacks the scope.
    """
    principal: Principal | None = request.scope["state"]["principal"]
    if principal is None:
        raise InvalidTokenError
    if scope not in principal.scopes:
        raise InsufficientScopeError(f"this key lacks the scope '{scope}'")
    return principal


def credential_of(request: Request) -> str:
    """What was sent to prove who is asking."""
    credential: str = request.scope["state"]["credential"]
    return credential


def _credential(headers: list[tuple[bytes, bytes]]) -> str | None:
    # X-API-Key comes first, so that the header Authorization can be meant for a service behind the gateway.
    found = b""
    for name, value in headers:
        if name == b"x-api-key":
            found = value
            break
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            found = value[7:]
    return found.strip().decode("latin-1") or None


async def _viewer(request: Request) -> Principal:
    return require(request, KeyScope.VIEW)


async def _manager(request: Request) -> Principal:
    return require(request, KeyScope.MANAGE)


async def _admin(request: Request) -> Principal:
    return require(request, KeyScope.CLUSTER_ADMIN)


Viewer = Annotated[Principal, Depends(_viewer)]
"""Somebody who may read, as a parameter of a route."""
Manager = Annotated[Principal, Depends(_manager)]
"""Somebody who may change things, as a parameter of a route."""
Admin = Annotated[Principal, Depends(_admin)]
"""Somebody who runs the cluster, as a parameter of a route."""
