"""Has the cluster as the settings file says: accounts, queues and webhooks at the start, nodes when they are there.

What the file says wins over what was set before for the same name, and what it does not name stays. Later changes by
routes are good until the next start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sqlalchemy import Connection

from trainmaster.server.coordinator.webhook_subscriptions import Subscriptions
from trainmaster.server.core.errors import NotFoundError, RefusedError, SpecError
from trainmaster.server.core.resources import Queue
from trainmaster.server.settings.declared import Declared
from trainmaster.server.store import accounts, nodes, queues
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope

_EVERYTHING = Scope.everything()
_log = logging.getLogger(__name__)


class Declaring:
    def __init__(
        self,
        database: Database,
        declared: Declared,
        subscriptions: Subscriptions,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._declared = declared
        self._subscriptions = subscriptions
        self._clock = clock
        self._awaited = set(declared.nodes)
        """Nodes that nobody has reported yet."""
        self._warned = False

    def apply(self) -> None:
        """Apply everything in one transaction.

        Raises:
            RefusedError: a webhook cannot be as the file says.
        """
        declared = self._declared
        if any((declared.accounts, declared.queues, declared.webhooks)):
            self._database.write_now(self._write)
        self.settle_nodes()

    def settle_nodes(self) -> None:
        """Set labels and capabilities of the declared nodes that were reported since the last call."""
        if not self._awaited:
            return
        with self._database.read() as connection:
            known = {node.node_id for node in nodes.all(connection, _EVERYTHING)}
        there = self._awaited & known
        if known and self._awaited - known and not self._warned:
            self._warned = True
            missing, present = (", ".join(sorted(names)) for names in (self._awaited - known, known))
            _log.warning(
                "nobody has reported these nodes of the settings file yet: %s; there are: %s", missing, present
            )

        def work(connection: Connection) -> None:
            for name in sorted(there):
                given = self._declared.nodes[name]
                nodes.give(
                    connection,
                    _EVERYTHING,
                    name,
                    self._clock(),
                    labels=given.labels,
                    capabilities=given.capabilities,
                )

        if there:
            self._database.write_now(work)
            self._awaited -= there

    def _write(self, connection: Connection) -> None:
        now = self._clock()
        for name, account in self._declared.accounts.items():
            accounts.ensure(connection, _EVERYTHING, name, now)
            accounts.set_uid(connection, _EVERYTHING, name, account.uid)
        for name, queue in self._declared.queues.items():
            queues.put(connection, _EVERYTHING, Queue(name=name, weight=queue.weight, quota_gpus=queue.quota_gpus), now)
        for name, webhook in self._declared.webhooks.items():
            try:
                accounts.get(connection, _EVERYTHING, webhook.account)
                self._subscriptions.declare(connection, name, webhook)
            except NotFoundError:
                known = ", ".join(account.account_id for account in accounts.all(connection, _EVERYTHING))
                raise RefusedError(
                    f"webhooks.{name}.account: there is no account {webhook.account!r}; there are: {known}. "
                    "Declare it under [accounts], or make it first"
                ) from None
            except SpecError as error:
                raise RefusedError(f"webhooks.{name}: {error.message}") from None
