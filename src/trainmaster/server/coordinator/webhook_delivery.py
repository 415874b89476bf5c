"""One delivery to a webhook: its name is resolved once, and the connection goes to a checked address. No redirects."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import ipaddress
import json
import ssl
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from trainmaster import __version__
from trainmaster.protocol.sockets import is_public, resolve
from trainmaster.server.core.job import Job, JobEvent

TIMEOUT_S = 10.0
"""For one delivery, from the look-up of the name to the status of the response."""
MAX_URL_LENGTH = 2048


class DeliveryError(Exception):
    """A delivery that did not arrive; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    event_id: str
    """The same for every try."""
    body: bytes


def message_of(event_id: int, event: JobEvent, job: Job) -> Message:
    status = str(event.to_status)
    return _message(
        str(event_id),
        kind=f"job.{status.lower()}",
        at=event.at,
        account_id=job.account_id,
        job={
            "job_id": job.job_id,
            "name": job.name,
            "handle": job.handle,
            "labels": dict(job.labels),
            "queue": job.queue,
            "kind": job.workload_kind,
            "status": status,
            "previous_status": event.from_status,
            "reason": event.reason,
            "message": event.message,
            "attempt": event.attempt,
        },
    )


def trial(event_id: str, account_id: str, now: float) -> Message:
    return _message(event_id, kind="test", at=now, account_id=account_id, job=None)


def headers_of(message: Message, secret: str, now: float) -> dict[str, str]:
    timestamp = str(int(now))
    digest = hmac.new(secret.encode(), timestamp.encode() + b"." + message.body, hashlib.sha256).hexdigest()
    return {
        "Content-Type": "application/json",
        "User-Agent": f"trainmaster/{__version__}",
        "X-Trainmaster-Event": message.event_id,
        "X-Trainmaster-Timestamp": timestamp,
        "X-Trainmaster-Signature": f"v1={digest}",
    }


def url_problem(url: str, *, private_addresses: bool) -> str | None:
    """The problem with a webhook's address, as far as can be told without the network."""
    if len(url) > MAX_URL_LENGTH:
        return f"has more than {MAX_URL_LENGTH} characters"
    if not url.isascii() or not url.isprintable() or any(sign in url for sign in ' \\<>"'):
        return "has characters that no URL has"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        return "is no URL"
    if parts.scheme not in ("http", "https"):
        return "must begin with http:// or https://"
    if not host or port == 0:
        return "names no host that could be reached"
    if "@" in parts.netloc:
        return "must not hold a user or a password: deliveries are signed instead"
    if parts.fragment:
        return "must not have a fragment"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return None if private_addresses or is_public(address) else _not_public(host)


@dataclass(eq=False, kw_only=True)
class Poster:
    """Sends messages, each over a connection of its own."""

    private_addresses: bool
    ca: Path | None
    timeout_s: float

    async def post(self, url: str, message: Message, headers: Mapping[str, str]) -> int:
        """Send a message, and return the status of a successful response; otherwise raise DeliveryError."""
        if (problem := url_problem(url, private_addresses=self.private_addresses)) is not None:
            raise DeliveryError(f"the url {problem}")
        try:
            async with asyncio.timeout(self.timeout_s):
                status = await self._post(httpx.URL(url), message.body, headers)
        except TimeoutError:
            raise DeliveryError(f"no answer within {self.timeout_s:g} s") from None
        if 300 <= status < 400:
            raise DeliveryError(f"answered with {status}; redirects are not followed")
        if not 200 <= status < 300:
            raise DeliveryError(f"answered with {status}")
        return status

    async def _post(self, url: httpx.URL, body: bytes, headers: Mapping[str, str]) -> int:
        addresses = await self._resolve(url)
        verify = self._trust if url.scheme == "https" else False
        sent: dict[str, Any] = {
            "content": body,
            "headers": {**headers, "Host": url.netloc.decode()},
            "extensions": {"sni_hostname": url.host} if url.scheme == "https" else {},
        }
        problem = ""
        async with httpx.AsyncClient(verify=verify, timeout=None, trust_env=False, follow_redirects=False) as client:
            for address in addresses:
                try:
                    async with client.stream("POST", url.copy_with(host=address), **sent) as answer:
                        return answer.status_code
                except httpx.ConnectError as error:
                    problem = f"cannot be reached: {error}"
                except httpx.HTTPError as error:
                    raise DeliveryError(f"broke off: {error or type(error).__name__}") from None
        raise DeliveryError(problem)

    async def _resolve(self, url: httpx.URL) -> list[str]:
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            addresses = await asyncio.wrap_future(_look_up(url.host, port))
        except (OSError, UnicodeError) as error:
            raise DeliveryError(f"{url.host} has no address: {error}") from None
        allowed = [address for address, public in addresses.items() if public or self.private_addresses]
        if not allowed:
            raise DeliveryError(f"the url {_not_public(url.host)}")
        return allowed

    @functools.cached_property
    def _trust(self) -> ssl.SSLContext:
        """Read once, and only if it is needed: reading the system's certificates takes a while."""
        context = ssl.create_default_context()
        if self.ca is not None:
            context.load_verify_locations(self.ca)
        return context


def _look_up(host: str, port: int) -> Future[dict[str, bool]]:
    """Resolve a host in a thread that nobody waits for, as a name server may never answer."""
    answer: Future[dict[str, bool]] = Future()
    answer.set_running_or_notify_cancel()  # from now on it cannot be cancelled, as the thread cannot

    def ask() -> None:
        try:
            answer.set_result(resolve(host, port))
        except (OSError, UnicodeError) as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="look-up", daemon=True).start()
    return answer


def _message(event_id: str, *, kind: str, at: float, account_id: str, job: Mapping[str, Any] | None) -> Message:
    document = {
        "event_id": event_id,
        "type": kind,
        "created_at": datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z"),
        "account_id": account_id,
        "job": job,
    }
    return Message(event_id=event_id, body=json.dumps(document, separators=(",", ":")).encode())


def _not_public(host: str) -> str:
    return f"leads to {host}, which is no public address; the setting webhook_private_addresses allows such"
