"""Accounts and keys on the wire."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from trainmaster.server.core.accounts import (
    ACCOUNT_ID_PATTERN,
    DEFAULT_PREFIX,
    MAX_UID,
    PREFIX_PATTERN,
    Account,
    KeyScope,
)
from trainmaster.server.http.envelope import Ok, Wire
from trainmaster.server.http.wire.reported import instant
from trainmaster.server.store.keys import ApiKey

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


class NewKeyBody(_Body):
    """A key to make."""

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


def named_account(account_id: str) -> NamedAccount:
    """An account as clients of the Fireworks door look for it."""
    return NamedAccount(name=f"accounts/{account_id}", displayName=account_id)


def account_resource(account: Account) -> AccountResource:
    """An account as it is shown."""
    return AccountResource(account_id=account.account_id, uid=account.uid, created_at=instant(account.created_at))


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
