"""`client.admin`: accounts and API keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import quote

from trainmaster.client.connection import Connection
from trainmaster.client.types import Account, Key, NewKey


class Admin:
    """Accounts and keys. To change them, your own key needs the scope `cluster_admin`; without it, you see your own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def accounts(self) -> Sequence[Account]:
        """Accounts, by name."""
        return cast(Sequence[Account], self._connection.call("GET", "/v1/accounts")["accounts"])

    def account(self, account_id: str) -> Account:
        """One account."""
        return cast(Account, self._connection.call("GET", _account(account_id)))

    def create_account(self, account_id: str, *, uid: int | None = None) -> Account:
        """Make an account; its jobs run as the system's user `uid` on the server's machine."""
        body = {"account_id": account_id, "uid": uid}
        return cast(Account, self._connection.call("POST", "/v1/accounts", json=body))

    def set_uid(self, account_id: str, uid: int | None) -> Account:
        """Say as which of the system's users the jobs of an account run."""
        return cast(Account, self._connection.call("PATCH", _account(account_id), json={"uid": uid}))

    def remove_account(self, account_id: str) -> Account:
        """Remove an account that has neither jobs nor keys."""
        return cast(Account, self._connection.call("DELETE", _account(account_id)))

    def keys(self) -> Sequence[Key]:
        """Keys, the oldest first, revoked ones among them."""
        return cast(Sequence[Key], self._connection.call("GET", "/v1/keys")["keys"])

    def own_key(self) -> Key:
        """The key that this client uses."""
        return cast(Key, self._connection.call("GET", "/v1/keys/current"))

    def create_key(
        self, name: str, *, scopes: Sequence[str], account_id: str | None = None, prefix: str | None = None
    ) -> NewKey:
        """Make a key of an account, by default your own; `prefix` is what the key begins with."""
        body: dict[str, Any] = {"name": name, "scopes": [*scopes]}
        if account_id is not None:
            body["account_id"] = account_id
        if prefix is not None:
            body["prefix"] = prefix
        return cast(NewKey, self._connection.call("POST", "/v1/keys", json=body))

    def revoke_key(self, key_id: str) -> Key:
        """Revoke a key, for good."""
        return cast(Key, self._connection.call("DELETE", f"/v1/keys/{quote(key_id, safe='')}"))


def _account(account_id: str) -> str:
    return f"/v1/accounts/{quote(account_id, safe='')}"
