"""As which of the system's users the jobs of an account run on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from sqlalchemy import Connection

from trainmaster.protocol.launch import CONTAINER, LOCAL
from trainmaster.server.core.accounts import DEFAULT_ACCOUNT, Account
from trainmaster.server.core.errors import RefusedError
from trainmaster.server.settings.settings import Settings
from trainmaster.server.store import accounts
from trainmaster.server.store.scope import Scope

HERE = frozenset({LOCAL, CONTAINER})
"""The backends whose jobs run on this machine."""
ROOT = 0
_REMEMBER_S = 5.0
"""How long a yes holds: to ask the database at every submission would cost a tenth of it."""


class Tenants:
    """Checks at each submission that jobs of an account may run here. Call it on one thread."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._fine_until: dict[tuple[str, str], float] = {}

    def require(self, connection: Connection, scope: Scope, account_id: str, backend: str) -> None:
        """Raise RefusedError, with the remedy, when they may not."""
        now = self._clock()
        if now >= self._fine_until.get((account_id, backend), 0.0):
            runs_as(accounts.get(connection, scope, account_id), self._settings, contained=backend == CONTAINER)
            self._fine_until[account_id, backend] = now + _REMEMBER_S


def runs_as(
    account: Account, settings: Settings, *, server_uid: int | None = None, contained: bool = False
) -> int | None:
    """The uid that runs the account's jobs; None means the server's own.

    `server_uid` is the uid of the server, where that is not this process; `contained` says that the jobs run in
    containers.

    Raises:
        RefusedError: the jobs must not run here, or cannot; the message says what to do.
    """
    own = os.geteuid() if server_uid is None else server_uid
    name = account.account_id
    check_uid(account, server_uid=own)
    if account.uid is None:
        if contained or not is_confined(account, settings):
            return None
        raise RefusedError(
            f"account {name} has no user of its own on this machine, where its jobs could read those of other "
            f"accounts; give it one with `trainmaster accounts edit {name} --uid UID`, use the backend container where "
            "there is one, or allow all accounts to share the server's user with the setting shared_uid"
        )
    if contained and account.uid != own:
        raise RefusedError(
            f"jobs of account {name} run as uid {account.uid}, and what they leave in a container of this machine is "
            "the server's own; use the backend local, or take the uid away from the account"
        )
    return None if account.uid == own else account.uid


def is_confined(account: Account, settings: Settings) -> bool:
    """Whether an account's jobs may run on this machine only in containers, which separate them from others."""
    return account.uid is None and not settings.shared_uid and account.account_id != DEFAULT_ACCOUNT


def check_uid(account: Account, *, server_uid: int | None = None) -> None:
    """Raise RefusedError unless a server can run jobs as the user that an account names."""
    own = os.geteuid() if server_uid is None else server_uid
    name = account.account_id
    if account.uid == ROOT:
        raise RefusedError(f"jobs of account {name} would run as root; give it another uid")
    if account.uid is not None and own not in (ROOT, account.uid):
        raise RefusedError(
            f"jobs of account {name} run as uid {account.uid}, and a server that runs as uid {own} cannot start them; "
            "run the server as root, or take the uid away from the account"
        )
