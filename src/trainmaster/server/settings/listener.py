"""The listening socket: its address, whether it needs TLS, and connection limits that apply before authentication."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Iterator

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trainmaster.server.core.errors import RefusedError
from trainmaster.server.settings.settings import Settings

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""For TLS 1.2, the oldest version that is accepted. Of TLS 1.2, uvicorn's default has only CBC with SHA-1."""


def check_listener(settings: Settings) -> None:
    """Refuse settings with which others on the network can read the traffic, or an unusable certificate."""
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise RefusedError("tls_cert and tls_key belong together: set both, or neither")
    if settings.tls_cert is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                settings.tls_cert, settings.tls_key, password=_no_password
            )
        except OSError as error:
            raise RefusedError(f"tls_cert {settings.tls_cert} and tls_key cannot be used: {error}") from error
    elif not settings.is_private and not settings.behind_proxy:
        raise RefusedError(
            f"on {settings.host} keys and jobs would travel in the clear; set tls_cert and tls_key, or, if a proxy in "
            "front does TLS, behind_proxy (--behind-proxy); or listen on 127.0.0.1"
        )


@contextlib.contextmanager
def open_listener(settings: Settings) -> Iterator[socket.socket]:
    """A socket on the configured port; for port 0, the previous one if free: workers and clients may still use it."""
    remembered = settings.data_dir / "port"
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if settings.port == 0 and remembered.exists():
            with contextlib.suppress(OSError, ValueError, OverflowError):
                listener.bind((settings.host, int(remembered.read_text())))
        if listener.getsockname()[1] == 0:
            listener.bind((settings.host, settings.port))
        remembered.write_text(str(listener.getsockname()[1]))
        yield listener


def url_of(settings: Settings, listener: socket.socket) -> str:
    """The server's URL for clients on this machine."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _no_password() -> str:
    """Refuse an encrypted key; by default, the ssl module would ask for the password on the terminal."""
    raise OSError("the key is encrypted; a server needs one that is not")


MAX_HEAD_BYTES = 128 << 10
"""Limit of the request line and headers: two tokens for other services take 16 KiB each; the parser has no limit."""
HEAD_WITHIN_S = 30.0
"""How long a connection may be open before it has sent all headers of a request."""

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    b"Content-Length: 28\r\n\r\nThe headers are too large.\r\n"
)


class BoundedProtocol(HttpToolsProtocol):
    """HTTP protocol that limits the size of request headers and the time until they are complete."""

    head_within_s = HEAD_WITHIN_S
    _head_bytes = 0
    _in_head = False
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()
        elif self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._expect()  # blank lines have stopped uvicorn's own keep-alive timer

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._deadline is None:
            self._expect()

    def on_headers_complete(self) -> None:
        self._in_head = False  # the route that reads the body limits its size
        self._relax()
        super().on_headers_complete()

    def _expect(self) -> None:
        self._deadline = self.loop.call_later(self.head_within_s, self._give_up)

    def _relax(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()
