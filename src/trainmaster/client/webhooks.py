"""Webhooks: made and watched over a server, and checked where they arrive."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote

from trainmaster.client.connection import Connection
from trainmaster.client.errors import NotFoundError, SignatureError
from trainmaster.client.types import CreatedWebhook, Trial, Webhook

EVENT_HEADER = "X-Trainmaster-Event"
TIMESTAMP_HEADER = "X-Trainmaster-Timestamp"
SIGNATURE_HEADER = "X-Trainmaster-Signature"
TOLERANCE_S = 300.0
"""How old a delivery may be when it arrives: one that somebody recorded is no good for long."""
SECRET_PREFIX = "whsec_"


class Webhooks:
    """The webhooks of a key's account, as `Client.webhooks`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def list(self) -> Sequence[Webhook]:
        """Every webhook, and how it does."""
        return cast(Sequence[Webhook], self._connection.call("GET", "/v1/webhooks")["webhooks"])

    def get(self, webhook_id: str) -> Webhook:
        """One webhook."""
        return cast(Webhook, self._connection.call("GET", _path(webhook_id)))

    def create(self, url: str, *, statuses: Sequence[str] = (), secret: str | None = None) -> CreatedWebhook:
        """Make a webhook; its secret, given or made, is in the answer and never again.

        Sent again when the connection breaks, and still made once: the same url with the same secret is the same.
        """
        secret = secret or SECRET_PREFIX + secrets.token_urlsafe(32)
        body = {"url": url, "statuses": [*statuses], "secret": secret}
        return cast(CreatedWebhook, self._connection.call("POST", "/v1/webhooks", json=body))

    def change(
        self,
        webhook_id: str,
        *,
        url: str | None = None,
        statuses: Sequence[str] | None = None,
        secret: str | None = None,
    ) -> Webhook:
        """Change a webhook; it goes on with the event that is next."""
        wanted = {"url": url, "statuses": None if statuses is None else [*statuses], "secret": secret}
        body = {name: value for name, value in wanted.items() if value is not None}
        return cast(Webhook, self._connection.call("PATCH", _path(webhook_id), json=body))

    def remove(self, webhook_id: str, *, missing_ok: bool = False) -> None:
        """Take a webhook away."""
        try:
            self._connection.call("DELETE", _path(webhook_id))
        except NotFoundError:
            if not missing_ok:
                raise

    def test(self, webhook_id: str) -> Trial:
        """Have the server send a test event now, and say how that went."""
        return cast(Trial, self._connection.call("POST", f"{_path(webhook_id)}/test"))


def verify_webhook(
    secret: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    tolerance_s: float = TOLERANCE_S,
    now: float | None = None,
) -> dict[str, Any]:
    """Check that a delivery comes from whoever has the secret, and is fresh; returns what it says.

    Args:
        secret: what was shown when the webhook was made.
        headers: of the request; the case of their names does not matter.
        body: of the request, byte by byte as it came.
        tolerance_s: how far the clocks of sender and receiver may be apart.
        now: Unix seconds; by default the time.

    Raises:
        SignatureError: it does not, or it is too old.
    """
    sent = {name.lower(): value for name, value in headers.items()}
    timestamp, signatures = sent.get(TIMESTAMP_HEADER.lower(), ""), sent.get(SIGNATURE_HEADER.lower(), "")
    if not timestamp.isdecimal() or not signatures:
        raise SignatureError("the delivery is not signed")
    if abs((time.time() if now is None else now) - int(timestamp)) > tolerance_s:
        raise SignatureError("the delivery is too old, or the clocks are far apart")
    expected = "v1=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    if not any(hmac.compare_digest(expected.encode(), each.strip().encode()) for each in signatures.split(",")):
        raise SignatureError("the signature is not that of the secret")
    document: dict[str, Any] = json.loads(body)
    return document


def _path(webhook_id: str) -> str:
    return f"/v1/webhooks/{quote(webhook_id, safe='')}"
