"""Accounts and API keys. Everybody sees their own; cluster administrators see and change all."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field, StringConstraints
from sqlalchemy import Connection

from trainmaster.schema.accounts import AccountList, AccountResource, KeyList, KeyResource, NewKey
from trainmaster.server.core import accounts as core
from trainmaster.server.core.errors import NotFoundError
from trainmaster.server.core.fields import Model
from trainmaster.server.http.auth import ADMINS_ONLY, Admin, Gate, Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import JSON, Ok, ok, resource
from trainmaster.server.http.errors import InsufficientScopeError, wrong
from trainmaster.server.http.requests import PREFIX, read_model
from trainmaster.server.http.router import PlainText, StrictRoute, answers, errors
from trainmaster.server.store import accounts
from trainmaster.server.store.accounts import ApiKey
from trainmaster.server.store.scope import Scope

AccountId = Annotated[str, StringConstraints(pattern=core.ACCOUNT_ID_PATTERN)]
Uid = Annotated[
    int | None,
    Field(ge=1, le=core.MAX_UID, description="The uid that runs its jobs on the server's machine."),
]


class NewAccountBody(Model):
    """An account to make."""

    account_id: AccountId
    uid: Uid = None


class EditAccountBody(Model):
    """What to change of an account."""

    uid: Uid


class NamedAccount(Model):
    """An account, as clients of the Fireworks door look for it."""

    name: str = Field(description="`accounts/` and its id.")
    displayName: str  # noqa: N815 - the protocol's name
    state: Literal["READY"] = "READY"


class AccountsAnswer(Ok[AccountList]):
    """Accounts: in `data` those that you may see, beside it your key's own, which other clients look for there."""

    accounts: list[NamedAccount] = Field(description="The account of your key, and no other.")


router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["accounts"])

AccountPath = Annotated[str, Path(min_length=1, max_length=256)]
_EVERYTHING = Scope.everything()


@router.get("/accounts", response_model=AccountsAnswer, responses=errors())
async def list_accounts(
    principal: Viewer,
    context: Context,
    page_size: Annotated[int, Query(alias="pageSize", ge=0, description="Without an effect.")] = 0,  # noqa: ARG001
    page_token: Annotated[PlainText, Query(alias="pageToken", description="Without an effect.")] = "",  # noqa: ARG001
) -> Response:
    """List accounts: your own, or all of them with `cluster_admin`.

    Clients of the Fireworks door take the account of their key from `accounts`, and want to find exactly one there.
    """
    found = await context.read(accounts.all, principal.reach)
    whole = AccountsAnswer(
        data=AccountList(accounts=[resource(AccountResource, account) for account in found]),
        accounts=[NamedAccount(name=f"accounts/{principal.account_id}", displayName=principal.account_id)],
    )
    return Response(whole.model_dump_json(), media_type=JSON)


@router.post(
    "/accounts",
    status_code=HTTPStatus.CREATED,
    dependencies=ADMINS_ONLY,
    **answers(AccountResource, 400, 409, body=NewAccountBody, required=True),
)
async def create_account(request: Request, context: Context) -> Response:
    """Make an account."""
    wanted = await read_model(request, NewAccountBody)
    account = core.Account(account_id=wanted.account_id, uid=wanted.uid, created_at=context.clock())
    context.check_account(account)
    await context.write(accounts.create, _EVERYTHING, account)
    return ok(resource(AccountResource, account), HTTPStatus.CREATED)


@router.get("/accounts/{account_id}", **answers(AccountResource, 404))
async def show_account(principal: Viewer, context: Context, account_id: AccountPath) -> Response:
    """Show an account."""
    return ok(resource(AccountResource, await context.read(accounts.get, principal.reach, account_id)))


@router.patch(
    "/accounts/{account_id}",
    dependencies=ADMINS_ONLY,
    **answers(AccountResource, 400, 404, body=EditAccountBody, required=True),
)
async def edit_account(request: Request, context: Context, account_id: AccountPath) -> Response:
    """Say as which of the system's users the jobs of an account run; null for none in particular."""
    wanted = await read_model(request, EditAccountBody)
    context.check_account(core.Account(account_id=account_id, uid=wanted.uid))

    def change(connection: Connection) -> core.Account:
        accounts.set_uid(connection, _EVERYTHING, account_id, wanted.uid)
        return accounts.get(connection, _EVERYTHING, account_id)

    return ok(resource(AccountResource, await context.write(change)))


@router.delete("/accounts/{account_id}", dependencies=ADMINS_ONLY, **answers(AccountResource, 404, 409))
async def remove_account(context: Context, account_id: AccountPath) -> Response:
    """Remove an account that has neither jobs nor keys."""

    def remove(connection: Connection) -> core.Account:
        account = accounts.get(connection, _EVERYTHING, account_id)
        accounts.remove(connection, _EVERYTHING, account_id)
        return account

    return ok(resource(AccountResource, await context.write(remove)))


keys_router = APIRouter(prefix=PREFIX, route_class=StrictRoute, tags=["keys"])

KeyId = Annotated[str, Path(min_length=1, max_length=256)]


class NewKeyBody(Model):
    """A key to make."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")]
    account_id: AccountId | None = Field(default=None, description="Whose it is; by default that of your key.")
    scopes: Annotated[list[core.KeyScope], Field(min_length=1, max_length=len(core.KeyScope))]
    prefix: Annotated[
        str, StringConstraints(pattern=core.PREFIX_PATTERN), Field(description="What the key begins with.")
    ] = core.DEFAULT_PREFIX


@keys_router.get("/keys", **answers(KeyList))
async def list_keys(principal: Viewer, context: Context) -> Response:
    """List keys, also revoked ones: those of your account, or of all accounts with `cluster_admin`."""
    found = await context.read(accounts.all_keys, principal.reach)
    return ok(KeyList(keys=[resource(KeyResource, key) for key in found]))


@keys_router.get("/keys/current", **answers(KeyResource))
async def show_own_key(principal: Viewer, context: Context) -> Response:
    """Show the key that this request was sent with: its name, account and scopes."""
    return ok(resource(KeyResource, await context.read(accounts.get_key, _EVERYTHING, principal.key_id)))


@keys_router.post("/keys", status_code=HTTPStatus.CREATED, **answers(NewKey, body=NewKeyBody, required=True))
async def create_key(request: Request, principal: Admin, context: Context) -> Response:
    """Make a key. The answer has it, and nobody is ever shown it again."""
    wanted = await read_model(request, NewKeyBody)
    scopes = tuple(scope for scope in core.KeyScope if scope in wanted.scopes)
    if beyond := ", ".join(scope for scope in scopes if scope not in principal.scopes):
        raise InsufficientScopeError(f"your key cannot give what it does not have: {beyond}")
    key = core.new_key(wanted.prefix)
    stored = ApiKey(
        key_id=core.key_id_of(key),
        account_id=principal.account_id if wanted.account_id is None else wanted.account_id,
        name=wanted.name,
        scopes=scopes,
        hash=core.key_digest(key),
        created_at=context.clock(),
        created_by=principal.key_id,
    )

    def create(connection: Connection) -> None:
        try:
            accounts.get(connection, _EVERYTHING, stored.account_id)
        except NotFoundError as error:
            raise wrong("account_id", f"{error.message}; make it first") from None
        accounts.create_key(connection, _EVERYTHING, stored)

    await context.write(create)
    return ok(resource(NewKey, stored, key=key), HTTPStatus.CREATED)


@keys_router.delete("/keys/{key_id}", dependencies=ADMINS_ONLY, **answers(KeyResource, 404))
async def revoke_key(request: Request, context: Context, key_id: KeyId) -> Response:
    """Revoke a key, for good: at once on this server, within 5 s on the others."""

    def revoke(connection: Connection) -> ApiKey:
        accounts.revoke_key(connection, _EVERYTHING, key_id, context.clock())
        return accounts.get_key(connection, _EVERYTHING, key_id)

    revoked = await context.write(revoke)
    gate: Gate = request.app.state.gate
    gate.forget(key_id)
    return ok(resource(KeyResource, revoked))
