"""API keys: cluster administrators create and revoke them. A key is shown once, when it is created."""

from __future__ import annotations

from datetime import datetime
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy import Connection

from trainmaster.server.core.accounts import DEFAULT_PREFIX, PREFIX_PATTERN, KeyScope, key_digest, key_id_of, new_key
from trainmaster.server.core.errors import NotFoundError, Problem, SpecError
from trainmaster.server.core.spec.parse import parse
from trainmaster.server.http.auth import Admin, Gate, Principal, Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import Ok, Wire, instant, ok
from trainmaster.server.http.errors import InsufficientScopeError
from trainmaster.server.http.requests import parse_json, read_body
from trainmaster.server.http.router import StrictRoute, body, errors
from trainmaster.server.http.routes.accounts import AccountId
from trainmaster.server.store import accounts
from trainmaster.server.store.accounts import ApiKey
from trainmaster.server.store.scope import Scope

router = APIRouter(route_class=StrictRoute, tags=["keys"])

KeyId = Annotated[str, Path(min_length=1, max_length=256)]
_EVERYTHING = Scope.everything()


class NewKeyBody(BaseModel):
    """A key to make."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")]
    account_id: AccountId | None = Field(default=None, description="Whose it is; by default that of your key.")
    scopes: Annotated[list[KeyScope], Field(min_length=1, max_length=len(KeyScope))]
    prefix: Annotated[
        str, StringConstraints(pattern=PREFIX_PATTERN), Field(description="What the key begins with.")
    ] = DEFAULT_PREFIX


class KeyResource(Wire):
    """A key, without the key."""

    key_id: str
    account_id: str
    name: str
    scopes: list[KeyScope]
    created_at: datetime
    created_by: str = Field(description="The id of the key that made it; empty for the first one of a server.")
    revoked_at: datetime | None


class NewKey(KeyResource):
    """A key that was just made."""

    key: str = Field(description="Shown here and never again.")


class KeyList(Wire):
    """Keys, the oldest first."""

    keys: list[KeyResource]


def key_resource(key: ApiKey) -> KeyResource:
    """A key as it is shown."""
    return KeyResource(
        key_id=key.key_id,
        account_id=key.account_id,
        name=key.name,
        scopes=[KeyScope(scope) for scope in key.scopes],
        created_at=instant(key.created_at),
        created_by=key.created_by,
        revoked_at=instant(key.revoked_at),
    )


@router.get("/keys", response_model=Ok[KeyList], responses=errors())
async def list_keys(principal: Viewer, context: Context) -> Response:
    """List keys, also revoked ones: those of your account, or of all accounts with `cluster_admin`."""
    found = await context.read(lambda connection: accounts.all_keys(connection, principal.reach))
    return ok(KeyList(keys=[key_resource(key) for key in found]))


@router.get("/keys/current", response_model=Ok[KeyResource], responses=errors())
async def show_own_key(principal: Viewer, context: Context) -> Response:
    """Show the key that this request was sent with: its name, account and scopes."""
    own = await context.read(lambda connection: accounts.get_key(connection, _EVERYTHING, principal.key_id))
    return ok(key_resource(own))


@router.post(
    "/keys",
    status_code=HTTPStatus.CREATED,
    response_model=Ok[NewKey],
    responses=errors(HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    openapi_extra=body(NewKeyBody, required=True),
)
async def create_key(request: Request, principal: Admin, context: Context) -> Response:
    """Make a key. The answer has it, and nobody is ever shown it again."""
    wanted = parse(NewKeyBody, parse_json(await read_body(request)))
    scopes = tuple(scope for scope in KeyScope if scope in wanted.scopes)
    _check_scopes(principal, scopes)
    key = new_key(wanted.prefix)
    stored = ApiKey(
        key_id=key_id_of(key),
        account_id=principal.account_id if wanted.account_id is None else wanted.account_id,
        name=wanted.name,
        scopes=scopes,
        hash=key_digest(key),
        created_at=context.clock(),
        created_by=principal.key_id,
    )

    def create(connection: Connection) -> None:
        try:
            accounts.get(connection, _EVERYTHING, stored.account_id)
        except NotFoundError as error:
            raise SpecError([Problem(field="account_id", message=f"{error.message}; make it first")]) from None
        accounts.create_key(connection, _EVERYTHING, stored)

    await context.write(create)
    return ok(NewKey(**key_resource(stored).model_dump(), key=key), HTTPStatus.CREATED)


@router.delete("/keys/{key_id}", response_model=Ok[KeyResource], responses=errors(HTTPStatus.NOT_FOUND))
async def revoke_key(request: Request, principal: Admin, context: Context, key_id: KeyId) -> Response:  # noqa: ARG001
    """Revoke a key, for good: at once on this server, within 5 s on the others."""

    def revoke(connection: Connection) -> ApiKey:
        accounts.revoke_key(connection, _EVERYTHING, key_id, context.clock())
        return accounts.get_key(connection, _EVERYTHING, key_id)

    revoked = await context.write(revoke)
    gate: Gate = request.app.state.gate
    gate.forget(key_id)
    return ok(key_resource(revoked))


def _check_scopes(principal: Principal, scopes: tuple[KeyScope, ...]) -> None:
    """Nobody gives what they do not have."""
    beyond = ", ".join(scope for scope in scopes if scope not in principal.scopes)
    if beyond:
        raise InsufficientScopeError(f"your key cannot give what it does not have: {beyond}")
