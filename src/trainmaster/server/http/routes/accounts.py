"""Accounts: who shares the cluster. Everybody sees their own; cluster administrators see and change all."""

from __future__ import annotations

from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy import Connection

from trainmaster.server.core.accounts import ACCOUNT_ID_PATTERN, MAX_UID, Account
from trainmaster.server.core.spec.parse import parse
from trainmaster.server.http.auth import Admin, Viewer
from trainmaster.server.http.context import Context
from trainmaster.server.http.envelope import JSON, Ok, Wire, instant, ok
from trainmaster.server.http.requests import parse_json, read_body
from trainmaster.server.http.router import PlainText, StrictRoute, body, errors
from trainmaster.server.store import accounts
from trainmaster.server.store.scope import Scope

AccountId = Annotated[str, StringConstraints(pattern=ACCOUNT_ID_PATTERN)]
Uid = Annotated[
    int | None,
    Field(ge=1, le=MAX_UID, description="The system's user as whom its jobs run on the server's machine."),
]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NewAccountBody(_Body):
    """An account to make."""

    account_id: AccountId
    uid: Uid = None


class EditAccountBody(_Body):
    """What to change of an account."""

    uid: Uid


class AccountResource(Wire):
    """Somebody who shares the cluster."""

    account_id: str
    uid: int | None
    created_at: datetime


class AccountList(Wire):
    """Accounts, by name."""

    accounts: list[AccountResource]


class NamedAccount(Wire):
    """An account, as clients of the Fireworks door look for it."""

    name: str = Field(description="`accounts/` and its id.")
    displayName: str  # noqa: N815 - the protocol's name
    state: Literal["READY"] = "READY"


class AccountsAnswer(Ok[AccountList]):
    """Accounts: in `data` those that you may see, beside it your key's own, which other clients look for there."""

    accounts: list[NamedAccount] = Field(description="The account of your key, and no other.")


def named_account(account_id: str) -> NamedAccount:
    """An account as clients of the Fireworks door look for it."""
    return NamedAccount(name=f"accounts/{account_id}", displayName=account_id)


def account_resource(account: Account) -> AccountResource:
    """An account as it is shown."""
    return AccountResource(account_id=account.account_id, uid=account.uid, created_at=instant(account.created_at))


router = APIRouter(route_class=StrictRoute, tags=["accounts"])

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
    found = await context.read(lambda connection: accounts.all(connection, principal.reach))
    whole = AccountsAnswer(
        data=AccountList(accounts=[account_resource(account) for account in found]),
        accounts=[named_account(principal.account_id)],
    )
    return Response(whole.model_dump_json(), media_type=JSON)


@router.post(
    "/accounts",
    status_code=HTTPStatus.CREATED,
    response_model=Ok[AccountResource],
    responses=errors(HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    openapi_extra=body(NewAccountBody, required=True),
)
async def create_account(request: Request, principal: Admin, context: Context) -> Response:  # noqa: ARG001
    """Make an account."""
    wanted = parse(NewAccountBody, parse_json(await read_body(request)))
    account = Account(account_id=wanted.account_id, uid=wanted.uid, created_at=context.clock())
    context.check_account(account)
    await context.write(lambda connection: accounts.create(connection, _EVERYTHING, account))
    return ok(account_resource(account), HTTPStatus.CREATED)


@router.get("/accounts/{account_id}", response_model=Ok[AccountResource], responses=errors(HTTPStatus.NOT_FOUND))
async def show_account(principal: Viewer, context: Context, account_id: AccountPath) -> Response:
    """Show an account."""
    found = await context.read(lambda connection: accounts.get(connection, principal.reach, account_id))
    return ok(account_resource(found))


@router.patch(
    "/accounts/{account_id}",
    response_model=Ok[AccountResource],
    responses=errors(HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    openapi_extra=body(EditAccountBody, required=True),
)
async def edit_account(
    request: Request,
    principal: Admin,  # noqa: ARG001 - it has to be one
    context: Context,
    account_id: AccountPath,
) -> Response:
    """Say as which of the system's users the jobs of an account run; null for none in particular."""
    wanted = parse(EditAccountBody, parse_json(await read_body(request)))
    context.check_account(Account(account_id=account_id, uid=wanted.uid))

    def change(connection: Connection) -> Account:
        accounts.set_uid(connection, _EVERYTHING, account_id, wanted.uid)
        return accounts.get(connection, _EVERYTHING, account_id)

    return ok(account_resource(await context.write(change)))


@router.delete(
    "/accounts/{account_id}",
    response_model=Ok[AccountResource],
    responses=errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
)
async def remove_account(principal: Admin, context: Context, account_id: AccountPath) -> Response:  # noqa: ARG001
    """Remove an account that has neither jobs nor keys."""

    def remove(connection: Connection) -> Account:
        account = accounts.get(connection, _EVERYTHING, account_id)
        accounts.remove(connection, _EVERYTHING, account_id)
        return account

    return ok(account_resource(await context.write(remove)))
