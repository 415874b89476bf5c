"""Creates, changes and removes webhooks, for their account and for the settings file."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

from sqlalchemy import Connection

from trainmaster.server.coordinator.webhook_delivery import TIMEOUT_S, Poster, url_problem
from trainmaster.server.core.errors import ConflictError, Problem, SpecError
from trainmaster.server.core.states import JobStatus
from trainmaster.server.settings.declared import DeclaredWebhook
from trainmaster.server.settings.encryption import Sealer, SealError
from trainmaster.server.store import events, webhooks
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope
from trainmaster.server.store.webhooks import Webhook

MOST_OF_AN_ACCOUNT = 50
SHORTEST_SECRET = 16
LONGEST_SECRET = 256
SECRET_PREFIX = "whsec_"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribedWebhook:
    """A webhook, and the secret that signs its deliveries."""

    webhook: Webhook
    secret: str = field(repr=False)
    made: bool
    """False when an equal webhook existed already."""


class Subscriptions:
    """The webhooks of all accounts. Their secrets are stored encrypted."""

    def __init__(
        self,
        database: Database,
        sealer: Sealer,
        *,
        private_addresses: bool,
        ca: Path | None = None,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._sealer = sealer
        self._private_addresses = private_addresses
        self._clock = clock
        self.poster = Poster(private_addresses=private_addresses, ca=ca, timeout_s=timeout_s)

    def create(
        self, scope: Scope, *, url: str, statuses: Sequence[JobStatus], secret: str | None
    ) -> Future[SubscribedWebhook]:
        """Create a webhook for what happens from now on; one that is equal in everything is found again."""
        self._check(url, secret)
        wanted = tuple(dict.fromkeys(map(str, statuses)))
        key = secret or SECRET_PREFIX + secrets.token_urlsafe(32)

        def work(connection: Connection) -> SubscribedWebhook:
            present = webhooks.all(connection, scope)
            for webhook in present:
                if (webhook.url, webhook.statuses) == (url, wanted) and self._is_signed_with(webhook, key):
                    return SubscribedWebhook(webhook=webhook, secret=key, made=False)
            if len(present) >= MOST_OF_AN_ACCOUNT:
                raise ConflictError(f"an account has at most {MOST_OF_AN_ACCOUNT} webhooks; remove one first")
            webhook = self._new(connection, scope, f"wh-{secrets.token_hex(6)}", url, wanted, key)
            return SubscribedWebhook(webhook=webhook, secret=key, made=True)

        return self._database.write(work)

    def change(
        self,
        scope: Scope,
        webhook_id: str,
        *,
        url: str | None = None,
        statuses: Sequence[JobStatus] | None = None,
        secret: str | None = None,
    ) -> Future[Webhook]:
        self._check(url, secret)

        def work(connection: Connection) -> Webhook:
            before = webhooks.get(connection, scope, webhook_id)
            after = replace(
                before,
                url=before.url if url is None else url,
                statuses=before.statuses if statuses is None else tuple(dict.fromkeys(map(str, statuses))),
                sealed=before.sealed if secret is None else self._sealer.seal(secret, about=_row(before)),
                failures=0,
                not_before=0.0,
            )
            webhooks.change(connection, scope, after)
            return after

        return self._database.write(work)

    def remove(self, scope: Scope, webhook_id: str) -> Future[None]:
        return self._database.write(lambda connection: webhooks.remove(connection, scope, webhook_id))

    def declare(self, connection: Connection, webhook_id: str, declared: DeclaredWebhook) -> None:
        """Have a webhook as the settings file says, within a transaction."""
        url, secret, scope = declared.url, declared.secret, Scope(declared.account)
        self._check(url, secret)
        wanted = tuple(dict.fromkeys(map(str, declared.statuses)))
        before = None
        for webhook in webhooks.all(connection, Scope.everything()):
            if webhook.webhook_id == webhook_id and webhook.account_id == declared.account:
                before = webhook
            elif webhook.webhook_id == webhook_id:
                webhooks.remove(connection, Scope(webhook.account_id), webhook_id)
        if before is None:
            self._new(connection, scope, webhook_id, url, wanted, secret)
        elif (before.url, before.statuses) != (url, wanted) or not self._is_signed_with(before, secret):
            sealed = self._sealer.seal(secret, about=_row(before))
            webhooks.change(connection, scope, replace(before, url=url, statuses=wanted, sealed=sealed))

    def secret_of(self, webhook: Webhook) -> str:
        """The secret that signs the deliveries; SealError when it was encrypted with a key that this server lacks."""
        return self._sealer.open(webhook.sealed, about=_row(webhook))

    def _new(
        self, connection: Connection, scope: Scope, webhook_id: str, url: str, statuses: tuple[str, ...], secret: str
    ) -> Webhook:
        webhook = Webhook(
            webhook_id=webhook_id,
            account_id=scope.account,
            url=url,
            statuses=statuses,
            sealed="",
            created_at=self._clock(),
            cursor=events.last_id(connection, scope),
        )
        webhook = replace(webhook, sealed=self._sealer.seal(secret, about=_row(webhook)))
        webhooks.create(connection, scope, webhook)
        return webhook

    def _is_signed_with(self, webhook: Webhook, secret: str) -> bool:
        try:
            return secrets.compare_digest(self.secret_of(webhook).encode(), secret.encode())
        except SealError:
            return False

    def _check(self, url: str | None, secret: str | None) -> None:
        check_webhook(url, secret, private_addresses=self._private_addresses)


def check_webhook(url: str | None, secret: str | None, *, private_addresses: bool) -> None:
    """Raise SpecError unless a webhook can have this url and this secret, where they are given."""
    problems = []
    if url is not None and (wrong := url_problem(url, private_addresses=private_addresses)):
        problems.append(Problem(field="url", message=wrong))
    if secret is not None and not (SHORTEST_SECRET <= len(secret) <= LONGEST_SECRET and secret.isprintable()):
        message = f"must have {SHORTEST_SECRET} to {LONGEST_SECRET} printable characters"
        problems.append(Problem(field="secret", message=message))
    if problems:
        raise SpecError(problems)


def _row(webhook: Webhook) -> str:
    return f"webhooks/{webhook.account_id}/{webhook.webhook_id}"
