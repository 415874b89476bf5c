"""Test deliveries to webhooks, sent while their account waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fastapi import Request

from trainmaster.server.coordinator.webhook_delivery import TIMEOUT_S, Message
from trainmaster.server.coordinator.webhook_subscriptions import Subscriptions
from trainmaster.server.http.errors import RateLimitedError

AT_ONCE_OF_AN_ACCOUNT = 4
"""A receiver may let each of them wait, with all that the server holds for it."""


class Trials:
    """Sends test deliveries. Belongs to one event loop."""

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._poster = subscriptions.poster()
        self._under_way: Counter[str] = Counter()

    async def post(self, account_id: str, url: str, message: Message, headers: Mapping[str, str]) -> int:
        """Send a message; the status of the answer, which is a good one.

        Raises:
            DeliveryError: it did not arrive, or was not taken.
            RateLimitedError: others of the account are under way.
        """
        if self._under_way[account_id] >= AT_ONCE_OF_AN_ACCOUNT:
            raise RateLimitedError("other tests of your account's webhooks are under way; wait for them", TIMEOUT_S)
        self._under_way[account_id] += 1
        try:
            return await self._poster.post(url, message, headers)
        finally:
            self._under_way[account_id] -= 1
            if not self._under_way[account_id]:
                del self._under_way[account_id]


def trials_of(request: Request) -> Trials:
    """The test deliveries of the application that got the request."""
    trials: Trials = request.app.state.trials
    return trials
