"""The system user that runs the jobs of an account."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from trainmaster.backends.base import Capabilities, FilesBy
from trainmaster.server.core.accounts import DEFAULT_ACCOUNT, Account
from trainmaster.server.core.errors import Problem, RefusedError
from trainmaster.server.settings.settings import Settings
from trainmaster.server.store import accounts
from trainmaster.server.store.scope import Scope

ROOT = 0
_HARMLESS_PATCHES = frozenset({
    "metadata.labels", "metadata.annotations", "spec.nodeSelector", "spec.tolerations", "spec.affinity",
    "spec.topologySpreadConstraints",
})  # fmt: skip
"""What accounts that do not trust each other may change in the template of a job's pods."""
_REUSE_S = 5.0
"""How long a positive answer is reused: reading the account takes a tenth of a submission."""


@dataclass(frozen=True, slots=True, eq=False)
class AccountIsolation:
    """Checks at each submission that jobs of an account may run here. Call it on one thread."""

    settings: Settings
    clock: Callable[[], float] = time.monotonic
    _allowed_until: dict[tuple[str, bool], float] = field(default_factory=dict, init=False)

    def require(self, connection: Connection, scope: Scope, account_id: str, capable: Capabilities) -> None:
        """Raise RefusedError, with the remedy, when they may not run on a backend with these capabilities."""
        trusted = self._trusts(account_id)
        if capable.files is FilesBy.OBJECT_ROOT and not trusted:
            raise RefusedError(
                f"jobs on this cluster get the server's keys of the object store, and account {account_id} could read "
                "the files of others there; use another backend, have its operator set the option `files` to `server`, "
                "or allow all accounts to share everything with the setting shared_uid"
            )
        if not capable.runs_here and not capable.submits_as_users:
            if not capable.isolates_accounts and not trusted:
                raise RefusedError(
                    f"all jobs on this cluster run as one user there, and account {account_id} could read the jobs of "
                    "others; use another backend, or allow all accounts to share that user with the setting shared_uid"
                )
            return
        now, isolated = self.clock(), capable.isolates_accounts
        if now >= self._allowed_until.get((account_id, isolated), 0.0):
            runs_as(accounts.get(connection, scope, account_id), self.settings, isolated=isolated)
            self._allowed_until[account_id, isolated] = now + _REUSE_S

    def require_patches(self, account_id: str, patches: Iterable[Mapping[str, Any]]) -> None:
        """Raise RefusedError if an account patches the pods of a job in a way that could reach those of others, as with
        their secrets, the directories of a node, or the rights of a service account."""
        if self._trusts(account_id):
            return
        named = (f"{part}.{name}" for patch in patches for part, changes in patch.items() for name in changes or ())
        if refused := next((name for name in named if name not in _HARMLESS_PATCHES), None):
            message = (
                f"account {account_id} may not patch {refused}, by which its jobs could reach those of other accounts; "
                f"it may patch {', '.join(sorted(_HARMLESS_PATCHES))}. The operator can set the cluster's option "
                "pod_template, or the setting shared_uid"
            )
            raise RefusedError.because([Problem(field="workload.kubernetes.runtime_patches", message=message)])

    def _trusts(self, account_id: str) -> bool:
        return account_id == DEFAULT_ACCOUNT or self.settings.shared_uid


def runs_as(
    account: Account, settings: Settings, *, server_uid: int | None = None, isolated: bool = False
) -> int | None:
    """The uid that runs the account's jobs; None means the server's own. RefusedError when they cannot run here.
    `server_uid`: if not this process's; `isolated`: the backend separates the jobs of accounts without a uid."""
    own = os.geteuid() if server_uid is None else server_uid
    name = account.account_id
    check_uid(account, server_uid=own)
    if account.uid is None:
        if isolated or not is_confined(account, settings):
            return None
        raise RefusedError(
            f"account {name} has no system user of its own, without which its jobs could read those of other "
            f"accounts; give it one with `trainmaster accounts edit {name} --uid UID`, use the backend container where "
            "there is one, or allow all accounts to share the server's user with the setting shared_uid"
        )
    if isolated and account.uid != own:
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
