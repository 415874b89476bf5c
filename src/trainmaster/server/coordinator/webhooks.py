"""Delivers events to webhooks, on the leader, in the order of the feed, at least once: a webhook's cursor moves when
the receiver has answered, in a transaction of the leader. Memory holds one page of events for each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from sqlalchemy import Connection

from trainmaster.server import failpoints
from trainmaster.server.coordinator.webhook_delivery import DeliveryError, Message, headers_of, message_of
from trainmaster.server.coordinator.webhook_subscriptions import Subscriptions
from trainmaster.server.core.errors import NotFoundError, NotLeaderError, TrainmasterError
from trainmaster.server.settings.telemetry import METERS
from trainmaster.server.store import events, jobs, leases, webhooks
from trainmaster.server.store.database import Database
from trainmaster.server.store.scope import Scope
from trainmaster.server.store.webhooks import Webhook

_log = logging.getLogger(__name__)
_EVERYTHING = Scope.everything()

FIRST_RETRY_S = 5.0
LONGEST_RETRY_S = 600.0
GIVE_UP_AFTER_S = 24 * 3600.0
PAGE = 50
LEAP = 1000
"""After so many events that do not concern a webhook, its cursor is stored."""
POLL_S = 0.25
IDLE_POLL_S = 5.0
"""While there is no webhook."""
REST_S = 5.0
"""After an error on our side."""

STATUS = "status"
"""The type of the events that are delivered."""

Key = tuple[str, str]


def retry_delay_s(failures: int) -> float:
    """How long an event waits after so many failures."""
    return float(min(FIRST_RETRY_S * 2.0 ** min(failures - 1, 32), LONGEST_RETRY_S))


def most_tries(give_up_after_s: float = GIVE_UP_AFTER_S) -> int:
    """How often an event is sent before the server gives up."""
    tries, waited_s = 1, 0.0
    while waited_s < give_up_after_s:
        waited_s += retry_delay_s(tries)
        tries += 1
    return tries


class Deliveries:
    """Delivers from `start` to `stop`, in a thread of its own, while this server leads."""

    def __init__(
        self,
        database: Database,
        subscriptions: Subscriptions,
        *,
        epoch: Callable[[], int | None],
        clock: Callable[[], float] = time.time,
        retry_after_s: Callable[[int], float] = retry_delay_s,
        tries: int | None = None,
    ) -> None:
        self._database = database
        self._subscriptions = subscriptions
        self._epoch_now = epoch
        self._clock = clock
        self._retry_after_s = retry_after_s
        self._tries = tries or most_tries()
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        self._poll_s = IDLE_POLL_S
        self._thread = threading.Thread(target=lambda: asyncio.run(self._deliver_all()), name="webhooks", daemon=True)
        self._epoch: int | None = None
        self._seen_version: int | None = None
        self._due = 0.0
        self._running: dict[Key, asyncio.Task[None]] = {}
        self._passed: dict[Key, int] = {}
        """Up to where the feed has nothing for a webhook, beyond its stored cursor."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop; a delivery under way is cut off, and the next leader repeats it."""
        self._stopping = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    async def _deliver_all(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not self._stopping:
            try:
                await self._look()
            except TrainmasterError as error:
                _log.warning("webhook deliveries are delayed: %s", error.message)
                self._due = time.monotonic() + REST_S
            except Exception:
                _log.exception("webhooks could not be read; this is tried again")
                self._due = time.monotonic() + REST_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), self._poll_s)
        await self._drop_all()

    async def _look(self) -> None:
        """Start a task for every webhook that has undelivered events."""
        epoch = self._epoch_now()
        if epoch != self._epoch:
            await self._drop_all()
            self._epoch, self._seen_version, self._due = epoch, None, 0.0
        if epoch is None:
            return
        version = await asyncio.to_thread(self._database.data_version)
        if version == self._seen_version and time.monotonic() < self._due:
            return
        known, end = await asyncio.to_thread(self._read_all)
        self._seen_version = version
        self._poll_s = POLL_S if known else IDLE_POLL_S
        now = self._clock()
        waits = []
        for webhook in known:
            key = _key(webhook)
            if key in self._running or max(webhook.cursor, self._passed.get(key, 0)) >= end:
                continue
            # A later time is by a clock that was set back since.
            if now < webhook.not_before <= now + LONGEST_RETRY_S:
                waits.append(webhook.not_before - now)
                continue
            self._running[key] = asyncio.create_task(self._deliver_to(webhook, epoch))
        for key in self._passed.keys() - {_key(webhook) for webhook in known}:
            del self._passed[key]
        self._due = time.monotonic() + min(waits, default=LONGEST_RETRY_S)

    async def _deliver_to(self, webhook: Webhook, epoch: int) -> None:
        """Deliver all new events to one webhook, until none is left or one fails."""
        try:
            while await self._deliver_page(webhook, epoch):
                webhook = await asyncio.to_thread(self._read_again, webhook)
        except (NotLeaderError, NotFoundError):
            return  # somebody else leads now, or the webhook was removed
        except TrainmasterError as error:
            _log.warning("webhook %s has to wait: %s", webhook.webhook_id, error.message)
            await asyncio.sleep(REST_S)
        except Exception:
            _log.exception("events could not be delivered to webhook %s; this is tried again", webhook.webhook_id)
            await asyncio.sleep(REST_S)
        finally:
            self._running.pop(_key(webhook), None)
            self._due = 0.0  # it may not have seen what was committed while it ran

    async def _deliver_page(self, webhook: Webhook, epoch: int) -> bool:
        """Deliver a page of events; returns whether there may be more now."""
        key = _key(webhook)
        start = max(webhook.cursor, self._passed.get(key, 0))
        messages, reached, more = await asyncio.to_thread(self._read_page, webhook, start)
        for cursor, message in messages:
            problem = await self._send(webhook, message)
            METERS.webhooks_delivered += not problem
            METERS.webhooks_failed += bool(problem)
            after = self._after(webhook, cursor, message, problem)
            if not await self._save(webhook, after, epoch):
                return True  # somebody changed it: look at it again
            if after.cursor != cursor:
                return False
            webhook = after
        self._passed[key] = reached
        if reached - webhook.cursor >= LEAP:
            await self._save(webhook, replace(webhook, cursor=reached), epoch)
        return more

    async def _send(self, webhook: Webhook, message: Message) -> str:
        """Send one message; returns what went wrong, or nothing."""
        try:
            headers = headers_of(message, self._subscriptions.secret_of(webhook), self._clock())
            await self._subscriptions.poster.post(webhook.url, message, headers)
        except DeliveryError as error:
            return str(error)
        except TrainmasterError as error:  # the secret does not open
            return error.message
        failpoints.reach("webhook:delivered")
        return ""

    def _after(self, webhook: Webhook, cursor: int, message: Message, problem: str) -> Webhook:
        """The webhook after a delivery, or after one that failed."""
        now = self._clock()
        if not problem:
            return replace(webhook, cursor=cursor, failures=0, not_before=0.0, delivered_at=now, problem="")
        failures = webhook.failures + 1
        if failures < self._tries:
            return replace(webhook, failures=failures, not_before=now + self._retry_after_s(failures), problem=problem)
        _log.warning("webhook %s: gave up on event %s: %s", webhook.webhook_id, message.event_id, problem)
        return replace(
            webhook,
            cursor=cursor,
            failures=0,
            not_before=0.0,
            problem=f"gave up on event {message.event_id}: {problem}",
            given_up=webhook.given_up + 1,
        )

    async def _save(self, before: Webhook, after: Webhook, epoch: int) -> bool:
        def work(connection: Connection) -> bool:
            leases.check(connection, _EVERYTHING, epoch)
            return webhooks.advance(connection, _EVERYTHING, before, after)

        return await asyncio.wrap_future(self._database.write(work))

    def _read_all(self) -> tuple[list[Webhook], int]:
        with self._database.read() as connection:
            known = webhooks.all(connection, _EVERYTHING)
            return known, events.last_id(connection, _EVERYTHING) if known else 0

    def _read_again(self, webhook: Webhook) -> Webhook:
        with self._database.read() as connection:
            return webhooks.get(connection, Scope(webhook.account_id), webhook.webhook_id)

    def _read_page(self, webhook: Webhook, start: int) -> tuple[list[tuple[int, Message]], int, bool]:
        """The next messages, the cursor up to which events were read, and whether there are more to read."""
        scope = Scope(webhook.account_id)
        with self._database.read() as connection:
            end = events.last_id(connection, scope)
            found = events.feed(connection, scope, start, PAGE)
            wanted = [
                (cursor, event)
                for cursor, event in found
                if event.type == STATUS and (not webhook.statuses or event.to_status in webhook.statuses)
            ]
            loaded = jobs.load(connection, scope, list({event.job_id for _, event in wanted}))
        known = {job.job_id: job for job in loaded}
        messages = [(cursor, message_of(cursor, event, known[event.job_id])) for cursor, event in wanted]
        more = len(found) == PAGE
        return messages, found[-1][0] if more else max(end, start), more

    async def _drop_all(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._running.clear()
        self._passed.clear()


def _key(webhook: Webhook) -> Key:
    return webhook.account_id, webhook.webhook_id
