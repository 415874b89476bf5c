"""Authentication and rate limits: API keys, stored as digests, and tokens that are valid for one attempt alone."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from trainmaster.server.core.accounts import KeyScope, key_digest
from trainmaster.server.core.errors import StoreUnavailableError
from trainmaster.server.http import errors
from trainmaster.server.http.context import ApiContext
from trainmaster.server.http.requests import METRICS_PATH, PREFIX
from trainmaster.server.store import accounts
from trainmaster.server.store.scope import Scope

FAILURES_PER_S = 1.0
"""Average rate of wrong credentials from one address."""
FAILURES_AT_ONCE = 30
_MOST_BUCKETS = 10_000


class Buckets:
    """Token buckets by name, each refilled at a constant rate. Not thread-safe."""

    def __init__(self, rate_per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate_per_s = rate_per_s
        self._burst = float(burst)
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}

    def wait_s(self, name: str) -> float:
        """How long until the bucket has a token; 0 when it has one."""
        return max(0.0, (1.0 - self._level(name, self._clock())) / self._rate_per_s)

    def take(self, name: str) -> float:
        """Take a token and return 0; from an empty bucket, return how long until it has one."""
        now = self._clock()
        level = self._level(name, now)
        if level < 1.0:
            return (1.0 - level) / self._rate_per_s
        if len(self._buckets) >= _MOST_BUCKETS:
            # A full bucket is as good as a new one; where none is full, all are forgotten.
            kept = {each: held for each, held in self._buckets.items() if self._level(each, now) < self._burst}
            self._buckets = kept if len(kept) < _MOST_BUCKETS else {}
        self._buckets[name] = (level - 1.0, now)
        return 0.0

    def _level(self, name: str, now: float) -> float:
        level, at = self._buckets.get(name, (self._burst, now))
        return min(self._burst, level + (now - at) * self._rate_per_s)


class ConcurrencyLimit:
    """Limits what is under way at the same time, by name. Not thread-safe."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._under_way: Counter[str] = Counter()

    @contextlib.contextmanager
    def count(self, name: str, refusal: errors.RateLimitedError) -> Iterator[None]:
        """Count one until the block ends; at the limit, raise `refusal`."""
        if self._under_way[name] >= self._most:
            raise refusal
        self._under_way[name] += 1
        try:
            yield
        finally:
            self._under_way[name] -= 1
            if not self._under_way[name]:
                del self._under_way[name]


OPEN_PATHS = frozenset({"/healthz", "/readyz"})
TOKEN_PATHS = (f"{PREFIX}/worker/", f"{PREFIX}/blobs/")
"""Where the credential may be an attempt's token; those routes check it themselves."""
SIGNED_PATHS = "/api/v1/downloads/"
"""Where the address itself is the credential: signed and limited in time. Those routes check the signature."""

AT_ONCE = 1000
"""Concurrent requests of one key, where limited: each costs a descriptor and memory. A followed stream is one."""

_REMEMBER_S = 5.0
"""How long a key that another server revoked may still work; a lookup would cost more than the request."""
_REMEMBER_MOST = 4096

_log = logging.getLogger(__name__)

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    account_id: str
    key_id: str
    name: str
    scopes: frozenset[str]

    @property
    def scope(self) -> Scope:
        return Scope(self.account_id)

    @property
    def reach(self) -> Scope:
        """The accounts and keys that it may see: all of them for a cluster administrator."""
        return Scope.everything() if KeyScope.CLUSTER_ADMIN in self.scopes else self.scope


class Gate:
    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._open = OPEN_PATHS | {METRICS_PATH} if context.settings.open_metrics else OPEN_PATHS
        self._known: dict[str, tuple[float, Principal]] = {}
        self._strangers: dict[str, float] = {}
        self._revocations = 0
        limited = context.settings.rate_limit > 0
        self._rates = Buckets(context.settings.rate_limit, context.settings.rate_burst) if limited else None
        self._mistakes = Buckets(FAILURES_PER_S, FAILURES_AT_ONCE) if limited else None
        self._concurrency = ConcurrencyLimit(AT_ONCE) if limited else None

    async def admit(self, scope: Any, path: str) -> None:
        """Authenticate a request, and note its principal in the scope's state."""
        if path in self._open or path.startswith(SIGNED_PATHS):
            return
        if (credential := _credential(scope["headers"])) is None:
            raise errors.UnauthenticatedError
        state = scope["state"]
        state["credential"] = credential
        by_token = path.startswith(TOKEN_PATHS)
        peer = str((scope.get("client") or ("",))[0])
        principal = await self._principal(key_digest(credential), None if by_token else peer)
        if principal is not None:
            state["principal"] = principal
            if self._rates is not None and (wait_s := self._rates.take(principal.key_id)):
                raise errors.RateLimitedError("too many requests with this key; slow down", wait_s)
        elif not by_token:
            raise errors.InvalidTokenError

    def under_way(self, principal: Principal | None) -> contextlib.AbstractContextManager[None]:
        if self._concurrency is None or principal is None:
            return contextlib.nullcontext()
        refusal = errors.RateLimitedError(f"{AT_ONCE} requests with this key are under way; end some of them", 1.0)
        return self._concurrency.count(principal.key_id, refusal)

    async def whose(self, credential: str) -> Principal | None:
        """The owner of a key that came inside a request; None when there is no such key."""
        return await self._principal(key_digest(credential), None)

    def forget(self, key_id: str) -> None:
        self._revocations += 1
        for digest, (_, principal) in list(self._known.items()):
            if principal.key_id == key_id:
                del self._known[digest]

    async def _principal(self, digest: str, peer: str | None) -> Principal | None:
        """The owner of a key; None when there is no such key. An address that sends many wrong keys has to wait."""
        now = time.monotonic()
        expires, principal = self._known.get(digest, (0.0, None))
        if now < expires or now < self._strangers.get(digest, 0.0):
            if principal is None:
                self._limit_guesses(peer, wrong=True)
            return principal
        if principal is None:
            self._limit_guesses(peer)
        revocations = self._revocations
        try:
            key = await self._context.read(accounts.find_key, Scope.everything(), digest)
        except StoreUnavailableError as error:
            # The database's own words are for its operators, and the caller is not known yet.
            _log.warning("keys cannot be looked up: %s", error.message)
            raise StoreUnavailableError("the database does not answer; try again") from None
        if key is None:
            self._known.pop(digest, None)
            _remember(self._strangers, digest, now + _REMEMBER_S)
            self._limit_guesses(peer, wrong=True)
            return None
        principal = Principal(account_id=key.account_id, key_id=key.key_id, name=key.name, scopes=frozenset(key.scopes))
        if revocations == self._revocations:  # else it may be this very key that was revoked while it was read
            _remember(self._known, digest, (now + _REMEMBER_S, principal))
        return principal

    def _limit_guesses(self, peer: str | None, *, wrong: bool = False) -> None:
        """Refuse a request from an address that sent too many wrong keys; count one that was `wrong`."""
        if self._mistakes is None or peer is None:
            return
        if wait_s := self._mistakes.take(peer) if wrong else self._mistakes.wait_s(peer):
            raise errors.RateLimitedError("too many wrong credentials came from your address", wait_s)


def _remember(memory: dict[str, Any], digest: str, what: Any) -> None:
    if len(memory) >= _REMEMBER_MOST:
        memory.clear()
    memory[digest] = what


def require(request: Request, scope: KeyScope) -> Principal:
    principal: Principal | None = request.scope["state"]["principal"]
    if principal is None:
        raise errors.InvalidTokenError
    if scope not in principal.scopes:
        raise errors.InsufficientScopeError(f"this key lacks the scope '{scope}'")
    return principal


def credential_of(request: Request) -> str:
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


def guard(function: FunctionT) -> FunctionT:
    """Mark a dependency of routes, or an endpoint, as one that checks who is asking."""
    function.__guard__ = True  # type: ignore[attr-defined]
    return function


def refuse_unguarded(router: APIRouter) -> None:
    """Raise RuntimeError for a route that does not check who is asking, or cannot be inspected."""
    for route in router.routes:
        called = [route.endpoint, *_calls(route.dependant)] if isinstance(route, APIRoute) else []
        is_open = isinstance(route, APIRoute) and route.path in OPEN_PATHS
        if not is_open and not any(hasattr(function, "__guard__") for function in called):
            raise RuntimeError(f"{route} does not check who is asking; give it a Viewer, Manager or Admin")


def _calls(dependant: Dependant) -> Iterator[Any]:
    for needed in dependant.dependencies:
        yield needed.call
        yield from _calls(needed)


def _needs(scope: KeyScope) -> Any:
    @guard
    async def principal(request: Request) -> Principal:
        return require(request, scope)

    return Depends(principal)


_viewer, _manager, _admin = map(_needs, (KeyScope.VIEW, KeyScope.MANAGE, KeyScope.CLUSTER_ADMIN))
VIEWERS_ONLY = [_viewer]
"""For `dependencies` of a route that does not care which viewer asks."""
ADMINS_ONLY = [_admin]
"""For `dependencies` of a route that does not care which administrator asks."""
Viewer = Annotated[Principal, _viewer]
Manager = Annotated[Principal, _manager]
Admin = Annotated[Principal, _admin]
