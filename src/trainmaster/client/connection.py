"""Requests to one server: envelopes are opened, errors raised, and requests that may be repeated sent again."""

from __future__ import annotations

import contextlib
import ssl
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import IO, Any, TypedDict, Unpack
from urllib.parse import quote, urlsplit

import httpx

from trainmaster import __version__
from trainmaster.client.errors import (
    ApiError,
    ClientError,
    RateLimitedError,
    UnavailableError,
    UnreachableError,
    UntrustedError,
    error_from_answer,
)
from trainmaster.client.server_lookup import Address
from trainmaster.protocol.environment import CA

RETRY_DELAYS_S = (0.1, 0.3, 0.9, 2.0)
"""Long enough for a server that restarts, short enough for a person who mistyped its address."""
LONGEST_RETRY_AFTER_S = 10.0
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

IDEMPOTENT = frozenset({"GET", "HEAD", "PUT", "DELETE"})
"""Methods that have the same effect when they are sent twice."""

_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"

Params = Mapping[str, Any]


class Options(TypedDict, total=False):
    """What a request may have beside its method and path."""

    params: Params | None
    """Those that are None are left out."""
    json: object
    body: Callable[[], IO[bytes]] | None
    """Opens the body, for each time that the request is sent."""
    headers: Mapping[str, str] | None
    patience_s: float | None
    """How long the answer may take; None: as long as usual."""


class Connection:
    """Requests to one server. May be used from several threads."""

    def __init__(
        self,
        address: Address,
        *,
        look_again: Callable[[], Address | None] | None = None,
        transport: httpx.BaseTransport | None = None,
        timeout: float = 30.0,
        verify: bool | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`look_again` finds the server after a restart, which may have given it another port.

        `verify` overrules whether its certificate is checked. `headers` are sent with every request.
        """
        _check(address)
        self._address = address
        self._look_again = look_again
        self._headers = headers
        self._http = httpx.Client(
            timeout=timeout,
            transport=transport,
            headers={"User-Agent": f"trainmaster/{__version__}"},
            # A proxy of the environment has no way to this machine's own loopback.
            trust_env=urlsplit(address.url).hostname not in LOOPBACK,
            # Reading the system's certificates takes longer than most requests.
            verify=_trusted(address) if verify is None else verify,
        )

    @property
    def url(self) -> str:
        return self._address.url

    @property
    def api_key(self) -> str:
        return self._address.api_key

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, **options: Unpack[Options]) -> Any:
        """Send a request as `answer` does; returns the `data` of the answer."""
        response = self.answer(method, path, **options)
        if method == "HEAD":
            return None
        document = document_of(response)
        if "data" not in document:
            raise _foreign(response)
        return document["data"]

    def answer(self, method: str, path: str, **options: Unpack[Options]) -> httpx.Response:
        """Send a request; returns the answer.

        It is sent again when the server cannot be reached, is unavailable or has had too many requests; when the
        connection breaks in the middle, only if that cannot have an effect twice: a POST or PATCH needs an
        Idempotency-Key for it. Raises ApiError, UnreachableError or UntrustedError.
        """
        repeatable = method in IDEMPOTENT or "Idempotency-Key" in (options.get("headers") or {})
        delays = iter(RETRY_DELAYS_S)
        while True:
            try:
                response = self.send(method, path, **options)
                if response.is_success:
                    return response
                raise _error_of(response)
            except (UnreachableError, UnavailableError, RateLimitedError) as error:
                delay = next(delays, None)
                if delay is None or not _may_pass(error, repeatable):
                    raise
                asked = error.retry_after_s if isinstance(error, ApiError) else None
                time.sleep(delay if asked is None else min(max(delay, asked), LONGEST_RETRY_AFTER_S))
            self.find_again()

    def change(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
        idempotency_key: str | None = None,
    ) -> Any:
        """Send a request that changes something; when it is sent again, it still has its effect once."""
        keyed = {**headers, "Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return self.call(method, path, json=body, headers=keyed)

    def pages(self, path: str, **params: Any) -> Iterator[Any]:
        """The pages of a list, fetched as they are needed."""
        while True:
            page = self.call("GET", path, params=params)
            yield page
            if not page.get("next_page_token"):
                return
            params["page_token"] = page["next_page_token"]

    def send(self, method: str, path: str, **options: Unpack[Options]) -> httpx.Response:
        """Send a request once; returns whatever the answer is."""
        body = options.get("body")
        with self._as_unreachable(), body() if body else contextlib.nullcontext() as content:
            return self._http.request(
                method,
                self.url.rstrip("/") + path,
                # An empty mapping would drop the query of the path.
                params=given(**(options.get("params") or {})) or None,
                json=options.get("json"),
                content=content,
                headers=self._with_key(options.get("headers") or {}),
                timeout=self._timeout(options.get("patience_s")),
            )

    @contextlib.contextmanager
    def fetch(
        self,
        path: str,
        *,
        params: Params = MappingProxyType({}),
        headers: Mapping[str, str] = MappingProxyType({}),
        silence_s: float | None = None,
    ) -> Iterator[httpx.Response]:
        """An answer whose body is yet to come; the connection is dead after `silence_s` without a byte of it."""
        with (
            self._as_unreachable(),
            self._http.stream(
                "GET",
                self.url.rstrip("/") + path,
                params=given(**params) or None,
                headers=self._with_key(headers),
                timeout=self._timeout(silence_s),
            ) as response,
        ):
            if not response.is_success:
                response.read()
                raise _error_of(response)
            yield response

    def find_again(self) -> None:
        """Look for the server again: a local one may have another port after a restart."""
        self._address = (self._look_again() if self._look_again else None) or self._address

    def _timeout(self, read_s: float | None) -> httpx.Timeout:
        usual = self._http.timeout
        return usual if read_s is None else httpx.Timeout(usual.connect, read=read_s)

    def _with_key(self, headers: Mapping[str, str]) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {**key, **self._headers, **headers}

    @contextlib.contextmanager
    def _as_unreachable(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise UnreachableError(f"the server at {self.url} does not answer in time") from error
        except (httpx.RequestError, httpx.InvalidURL) as error:
            if _UNTRUSTED in str(error):
                raise UntrustedError(
                    f"the certificate of {self.url} cannot be trusted ({error}); "
                    f"if it should be, name a file with that of its authority in {CA}"
                ) from error
            raise UnreachableError(f"no server answers at {self.url} ({error})") from error


def given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def route(*parts: str) -> str:
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def job_path(job: str, below: str = "") -> str:
    return route("jobs", job) + (f"/{below}" if below else "")


def _check(address: Address) -> None:
    try:
        parts = urlsplit(address.url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise UnreachableError(f"{address.url!r} is no URL of a server, such as http://127.0.0.1:7070")
    if not (address.api_key.isascii() and address.api_key.isprintable()) or " " in address.api_key:
        raise ClientError("the API key has characters that no key has, such as a space or a line break; copy it again")


def _trusted(address: Address) -> ssl.SSLContext | bool:
    if address.url.startswith("http://"):
        return False
    try:
        return ssl.create_default_context(cafile=address.ca) if address.ca else True
    except OSError as error:
        raise ClientError(f"the certificates in {address.ca} cannot be used: {error}") from error


def _may_pass(error: ClientError, repeatable: bool) -> bool:
    """Whether to send a request again: it may succeed then, and cannot have its effect twice."""
    if isinstance(error, UnavailableError | RateLimitedError) or isinstance(error.__cause__, httpx.ConnectError):
        return True
    return repeatable and isinstance(error.__cause__, httpx.NetworkError | httpx.RemoteProtocolError)


def _error_of(response: httpx.Response) -> ClientError:
    document = document_of(response)
    # A HEAD has no body, and a proxy in front of a server that is down answers for itself.
    if isinstance(document.get("error"), Mapping) or response.request.method == "HEAD" or response.is_server_error:
        return error_from_answer(response.status_code, document, response.headers.get("X-Request-Id"))
    return _foreign(response)


def document_of(response: httpx.Response) -> Mapping[str, Any]:
    """The JSON object that an answer holds; empty where it holds none."""
    try:
        document = response.json()
    except ValueError:
        return {}
    return document if isinstance(document, Mapping) else {}


def _foreign(response: httpx.Response) -> UnreachableError:
    url = str(response.url.copy_with(path="/", query=None)).rstrip("/")
    answered = f"{response.status_code} {response.reason_phrase}".strip()
    target = response.headers.get("Location")
    redirect = f", a redirect to {target}" if response.is_redirect and target else ""
    return UnreachableError(f"what answers at {url} is not a Trainmaster server (it answered {answered}{redirect})")
