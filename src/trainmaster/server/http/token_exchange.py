"""Token exchange (RFC 8693): from the caller's credential to tokens for the services that a job reads from."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import Iterable
from urllib.parse import urlsplit

import httpx

from trainmaster.protocol.secrets import SCAIATLAS_TOKEN, SCAIDRIVE_TOKEN
from trainmaster.server.core.errors import RefusedError
from trainmaster.server.http.errors import CredentialsRefusedError, ExchangeUnavailableError
from trainmaster.server.settings.settings import is_loopback

TIMEOUT_S = 5.0
"""Short, as a client waits for its submission."""
MAX_TOKEN_LENGTH = 16 << 10

_TOKEN = re.compile(rf"[ -~]{{1,{MAX_TOKEN_LENGTH}}}")
_MAX_ANSWER_BYTES = 256 << 10
_AUDIENCES = {SCAIDRIVE_TOKEN: "scaidrive", SCAIATLAS_TOKEN: "scaiatlas"}
_ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"
_MAX_REASON = 200


class TokenExchange:
    """Client of one endpoint. It logs nothing that it sends or receives."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Check the endpoint's address; raises RefusedError where credentials must not be sent."""
        self._url = _checked(url)
        self._timeout_s = timeout_s
        # Made once, as reading the certificates is slow.
        self._verify = ssl.create_default_context() if url.startswith("https:") else True

    async def tokens(self, credential: str, names: Iterable[str]) -> dict[str, str]:
        wanted = tuple(names)
        try:
            async with asyncio.timeout(self._timeout_s), httpx.AsyncClient(verify=self._verify) as client:
                found = await asyncio.gather(*(self._ask(client, credential, _AUDIENCES[name]) for name in wanted))
        except (httpx.HTTPError, TimeoutError) as error:
            # Only the error's type: its text may hold what was sent.
            raise ExchangeUnavailableError(
                f"the token exchange does not answer ({type(error).__name__}); try again, or send the tokens yourself"
            ) from None
        return dict(zip(wanted, found, strict=True))

    async def _ask(self, client: httpx.AsyncClient, credential: str, audience: str) -> str:
        question = client.build_request(
            "POST",
            self._url,
            data={
                "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
                "subject_token": credential,
                "subject_token_type": _ACCESS_TOKEN,
                "requested_token_type": _ACCESS_TOKEN,
                "audience": audience,
            },
            headers={"Accept": "application/json", "Accept-Encoding": "identity"},
        )
        answer = await client.send(question, stream=True)
        try:
            document = _document(await _body(answer))
        finally:
            await answer.aclose()
        if 400 <= answer.status_code < 500 and answer.status_code not in (404, 405, 408, 429):
            said = document.get("error_description") or document.get("error")
            reason = " ".join(said.split())[:_MAX_REASON] if isinstance(said, str) else ""
            reason = (reason or f"status {answer.status_code}").replace(credential, "***")
            raise CredentialsRefusedError(f"the token exchange gives no {audience} token for your key: {reason}")
        token = document.get("access_token") if answer.is_success else None
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise ExchangeUnavailableError(
                f"the token exchange answered with status {answer.status_code} and no {audience} token; "
                "try again, or send the tokens yourself"
            )
        return token


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise RefusedError("token_exchange must not hold a user name or a password")
    if not parts.hostname or parts.scheme not in ("http", "https"):
        raise RefusedError(f"token_exchange is no address of the form https://host/path: {url!r}")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise RefusedError(f"token_exchange must be https, because credentials are sent there: {url!r}")
    return url


async def _body(answer: httpx.Response) -> bytes:
    """The raw body of an answer; empty if it is too large for one."""
    body = b""
    async for piece in answer.aiter_raw():
        body += piece
        if len(body) > _MAX_ANSWER_BYTES:
            return b""
    return body


def _document(body: bytes) -> dict[str, object]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
